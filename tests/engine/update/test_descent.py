"""The step of the fast engine equals torch's own optimiser: SGD, Adam and AdamW, groups, clipping, resuming."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparring.engine import WeightAverage
from sparring.engine.plain import PlainUpdate
from sparring.engine.update.step import FastUpdate
from tests.engine.streams import Warm

CPU = torch.device("cpu")


def made() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # No bias before batch-norm: its gradient is rounding alone, and Adam makes full steps of that.
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.LayerNorm(64),
            nn.Linear(64, 4),
        ).train()


def two_groups(model: nn.Module, **last):
    """Matrices, then vectors, which is not the model's order."""
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == wide] for wide in (True, False))
    return [{"params": matrices}, {"params": vectors, **last}]


OPTIMISERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4, nesterov=True),
    "no-momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
    "no-decay": lambda m: torch.optim.SGD(two_groups(m, weight_decay=0.0), lr=1.0, momentum=0.9, weight_decay=0.1),
    "two-rates": lambda m: torch.optim.SGD(two_groups(m, lr=0.1), lr=1.0, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1.0, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1.0, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw-groups": lambda m: torch.optim.AdamW(two_groups(m, weight_decay=0.0, lr=0.5), lr=1.0, weight_decay=0.1),
    "adam-decoupled": lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1, decoupled_weight_decay=True),
}


def loss_of(model, x, x_adv, y):
    return nn.functional.cross_entropy(model(x_adv), y)


def fast_update(model, optimizer, **more) -> FastUpdate:
    given = {"batch": 8, "shape": (1, 6, 6), "device": CPU, "half": False, "compiled": False, "after": lambda: None}
    return FastUpdate(model, optimizer, loss_of, **given | more)


def batches(count: int):
    draw = torch.Generator().manual_seed(1)
    for number in range(count):
        rows = 5 if number == 2 else 8
        yield torch.rand(8, 1, 6, 6, generator=draw)[:rows], (torch.arange(8) % 4)[:rows], 0.01 * (number + 1)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return [{key: value for key, value in optimizer.state[p].items() if value is not None} for p in own]


@pytest.mark.parametrize("awp", [0.0, 0.01])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_fast_equals_plain(name, clip, awp, monkeypatch):
    """Weights, statistics and the optimiser's state, after five steps under a schedule; a warm-up leaves no trace."""
    monkeypatch.setattr("sparring.engine.update.step.Captured", Warm)
    plain_model, fast_model = made(), made()
    one, other = OPTIMISERS[name](plain_model), OPTIMISERS[name](fast_model)
    plain, fast = PlainUpdate(plain_model, one, loss_of, clip=clip), fast_update(fast_model, other, clip=clip)
    for x, y, lr in batches(5):
        torch.testing.assert_close(plain(x, x, y, lr, awp), fast(x, x, y, lr, awp))
    assert_same(plain_model, fast_model)
    for mine, theirs in zip(states(one), states(other), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["nesterov", "two-rates", "adamw-groups"])
def test_plain_update_takes_torchs_own_steps(name):
    """Written out: the rate of every group, torch's clipping, the optimiser's step. Bit for bit."""
    model, twin = made(), made()
    update, optimizer = PlainUpdate(model, OPTIMISERS[name](model), loss_of, clip=0.05), OPTIMISERS[name](twin)
    first = [group["lr"] for group in optimizer.param_groups]
    for x, y, lr in batches(4):
        update(x, x, y, lr)
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * (rate / first[0])
        optimizer.zero_grad()
        loss_of(twin, x, x, y).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", ["nesterov", "adamw-groups"])
def test_non_finite_loss_moves_no_weight_and_no_state(name):
    model = made()
    optimizer, average = OPTIMISERS[name](model), WeightAverage(model, 0.9)
    fast = fast_update(model, optimizer, clip=0.1, after=average.move)
    (x, y, lr), *_ = batches(1)
    fast(x, x, y, lr)
    held = [*model.parameters(), *fast.descent.state]
    before = [tensor.detach().clone() for tensor in held]
    fast(x, x * float("nan"), y, lr)
    assert fast.failed() and all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


@pytest.mark.parametrize("name", ["nesterov", "adamw", "adamw-groups"])
def test_state_of_the_other_engine_is_taken_over(name):
    """Three steps plain, then two fast, and the reverse: as five of one kind."""
    whole, found = made(), []
    update = PlainUpdate(whole, OPTIMISERS[name](whole), loss_of)
    for x, y, lr in batches(5):
        update(x, x, y, lr)
    for order in ("plain fast", "fast plain"):
        model, optimizer = made(), None
        steps = iter(batches(5))
        for kind, count in zip(order.split(), (3, 2), strict=True):
            before, optimizer = optimizer, OPTIMISERS[name](model)
            if before is not None:
                optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
                for group, rate in zip(optimizer.param_groups, OPTIMISERS[name](model).param_groups, strict=True):
                    group["lr"] = rate["lr"]
            make = fast_update if kind == "fast" else lambda m, o: PlainUpdate(m, o, loss_of)
            update = make(model, optimizer)
            for x, y, lr in (next(steps) for _ in range(count)):
                update(x, x, y, lr)
        found.append(model)
    for model in found:
        assert_same(whole, model)


def test_bf16_copies_follow_adamw():
    model = made()
    fast = fast_update(model, OPTIMISERS["adamw"](model), half=True)
    for x, y, lr in batches(3):
        fast(x, x, y, lr)
    assert fast.amp_copy.copies
    for copied, weight in zip(fast.amp_copy.copies, fast.amp_copy.weights, strict=True):
        assert torch.equal(copied, weight.detach().to(torch.bfloat16))


def test_kernels_serve_plain_sgd_alone():
    """The hand-written launch has one rate and one decay, and gradients as they come."""
    model = made()
    asked = []

    class Kernels:
        @staticmethod
        def DescendAll(*given, **numbers):
            asked.append(numbers)

    for name in OPTIMISERS:
        fast_update(model, OPTIMISERS[name](model), kernels=Kernels)
    fast_update(model, OPTIMISERS["sgd"](model), kernels=Kernels, clip=1.0)
    assert asked == [{"momentum": 0.9, "weight_decay": 5e-4}, {"momentum": 0.0, "weight_decay": 0.0}]
