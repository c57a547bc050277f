"""Hand-written parts run, can be left out, and change no result. By Triton's interpreter on a CPU."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run sparring bench --only parts", allow_module_level=True)

from sparring import engine
from sparring.engine import attack_path, select
from sparring.engine.attack import folded
from sparring.engine.attack.split_batch import SplitBatch
from sparring.engine.manual import fp8, fp8_simulated, fused_ops, read_chain, wide_resnet
from sparring.engine.triton import attack_step, batch_norm, conv, first_layer, pointwise, pooling, sgd
from sparring.models import build
from sparring.objectives import FAT, KTauPGD
from tests.engine.networks import OneBlock

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
def gpu(monkeypatch):
    """A CPU on which `prepare` chooses as on a GPU: the kernels run by the interpreter, nothing is captured."""
    for module in (select, attack_path):
        monkeypatch.setattr(module, "on_cuda", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda module, **how: module)
    # The interpreter cuts bf16 where a GPU rounds: more than the check of the fused operations allows.
    monkeypatch.setattr(attack_path, "fused_mismatch", lambda *given, **how: "")
    found = {
        "kernels_for": attack_step,
        "pointwise_for": pointwise,
        "convolutions_for": (conv, first_layer, pooling),
        "norms_for": (batch_norm, pooling),
        "descent_for": sgd,
    }
    for module in (select, attack_path, folded, read_chain, wide_resnet, fused_ops):
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
    x, y = torch.rand(4, *(how | given)["shape"], generator=draw), torch.randint(0, 10, (4,), generator=draw)
    model.train()
    attacked = made.attack(PGD, x, y, draw)
    loss = made.update(x, attacked.x_adv, y, 0.05, 0.0)
    assert not made.failed()
    return made, attacked.backprops.clone(), float(loss)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_part_can_be_left_out(name, gpu):
    torch.manual_seed(0)
    model = OneBlock() if name == "chain" else build("wrn-10-1", num_classes=10)
    with torch.no_grad():
        model.train()(torch.rand(16, 3, 4, 4))
    made, backprops, loss = trained(model)
    assert set(made.parts) - {"compile_ahead"} == EXPECTED[name], made.line
    assert "hand-written passes, captured; update: fused batch-norm, captured" in made.line
    for part in LEFT_OUT[name]:
        less, their_backprops, their_loss = trained(model, without=(part,))
        missing = set(made.parts) - set(less.parts)
        # What builds on a part goes with it.
        assert part in missing <= {part, *NEEDS.get(part, ())}, (part, missing)
        assert (backprops != their_backprops).sum() <= 1 and loss == pytest.approx(their_loss, rel=0.05), part


def test_eight_bits_where_they_are_asked_for_and_possible(gpu, monkeypatch):
    model = build("wrn-10-2", num_classes=10)
    images = torch.rand(16, 3, 8, 8)
    with torch.no_grad():
        model.train()(images)

    def path(fp8=True):
        found = attack_path.select_attack(model, images, attack_path.Run(4, (3, 8, 8), CPU, True, fp8, 16, frozenset()))
        assert isinstance(found.network, SplitBatch) != ("in fp8" in found.how)
        return found.how

    assert "fp8" not in path(fp8=False)
    monkeypatch.setattr(fp8, "fp8_for", lambda device: "fp8 needs more")
    assert path() == "batch-norm folded, hand-written passes (fp8 needs more), captured"
    monkeypatch.setattr(fp8, "fp8_for", lambda device: fp8_simulated)
    assert path() == "batch-norm folded, hand-written passes in fp8 (e4m3; gradients e5m2), captured"
    coarse = iter(["fp8 is too coarse", ""])
    with monkeypatch.context() as patch:
        patch.setattr(attack_path, "fused_mismatch", lambda *given, **how: next(coarse))
        assert path() == "batch-norm folded, hand-written passes (fp8 is too coarse), captured"
    made, _, _ = trained(model, fp8=True, shape=(3, 8, 8))
    assert "in fp8" in made.line and {"manual_wide", "fp8"} <= {*made.parts} and "split_batch" not in made.parts


LEFT_OUT = {"chain": ("manual", "fused_bn"), "wide": ("manual_wide",)}
NEEDS = {
    "attack_step": ("halves",),
    "manual": ("halves",),
    "manual_wide": ("halves",),
    "fused_bn": ("wide_channels",),
}
