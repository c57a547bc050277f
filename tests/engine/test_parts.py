"""Every hand-written part runs, can be left out, and changes no result.

Triton's interpreter runs the kernels on a CPU.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from itertools import zip_longest

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run sparring bench --only parts", allow_module_level=True)

from sparring import engine
from sparring.engine import select
from sparring.engine.attack import folded
from sparring.engine.manual import fused_ops, read_chain, wide_resnet
from sparring.engine.triton import attack_step, batch_norm, conv, first_layer, pointwise, pooling, sgd
from sparring.objectives import FAT, KTauPGD
from tests.engine.networks import Before, OneBlock

CPU = torch.device("cpu")
PGD = KTauPGD(eps=0.1, step_size=0.02, steps=2, tau=0, loss="ce", start="uniform")
EXPECTED = {
    "chain": {"manual", "attack_step", "halves", "refresh", "fused_bn", "wide_channels", "fused_sgd"},
    "wide": {
        "manual_wide",
        "attack_step",
        "halves",
        "split_batch",
        "refresh",
        "fused_bn",
        "wide_channels",
        "fused_sgd",
    },
}


@pytest.fixture
def gpu(monkeypatch, few_programs):
    """A CPU on which `prepare` chooses as on a GPU: Triton's interpreter runs the kernels, nothing is captured."""
    monkeypatch.setattr(select, "_on_cuda", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda module, **how: module)
    # The interpreter truncates bf16 where a GPU rounds: more than the check of the fused operations allows.
    monkeypatch.setattr(select, "fused_mismatch", lambda *given, **how: "")
    found = {
        "kernels_for": attack_step,
        "pointwise_for": pointwise,
        "convolutions_for": (conv, first_layer, pooling),
        "norms_for": (batch_norm, pooling),
        "descent_for": sgd,
    }
    for module in (select, folded, read_chain, wide_resnet, fused_ops):
        for name, kernels in found.items():
            with suppress(AttributeError):
                monkeypatch.setattr(module, name, lambda device, kernels=kernels: kernels)


def trained(model, **given):
    """The engine, and the model after one step of it."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    how = {"batch": 4, "shape": (3, 4, 4), "classes": 10, "device": CPU, "half": True, "kind": "fast"}
    made = engine.prepare(model, optimizer, FAT().loss, **(how | given))
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(4, 3, 4, 4, generator=draw), torch.randint(0, 10, (4,), generator=draw)
    model.train()
    attacked = made.attack(PGD, x, y, draw)
    loss = made.update(x, attacked.x_adv, y, 0.05, 0.0)
    assert not made.failed()
    return made, attacked.backprops.clone(), float(loss)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_part_can_be_left_out(name, gpu):
    torch.manual_seed(0)
    model = OneBlock() if name == "chain" else Before(classes=10)
    with torch.no_grad():
        model.train()(torch.rand(16, 3, 4, 4))
    made, backprops, loss = trained(model)
    assert set(made.parts) - {"compile_ahead"} == EXPECTED[name], made.line
    assert "hand-written passes, captured; update: fused batch-norm, captured" in made.line
    # One part of the attack and one of the update at a time: they do not depend on each other.
    for without in zip_longest(sorted(EXPECTED[name] - UPDATE), sorted(UPDATE)):
        parts = {part for part in without if part is not None}
        less, their_backprops, their_loss = trained(model, without=tuple(parts))
        missing = set(made.parts) - set(less.parts)
        # Parts that need one of them are left out with it.
        assert parts <= missing <= parts.union(*(NEEDS.get(part, ()) for part in parts)), (parts, missing)
        assert (backprops != their_backprops).sum() <= 1 and loss == pytest.approx(their_loss, rel=0.05), parts


UPDATE = {"fused_bn", "wide_channels", "fused_sgd"}
NEEDS = {
    "attack_step": ("halves",),
    "manual": ("halves",),
    "manual_wide": ("halves",),
    "fused_bn": ("wide_channels",),
}
