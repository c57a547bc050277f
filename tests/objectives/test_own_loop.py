"""An objective in the caller's own loop: the gradients of the package's loop, under whatever the caller brings."""

from __future__ import annotations

import copy
import multiprocessing
import os
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparring.attacks.losses import soft_targets
from sparring.data import Split, load
from sparring.engine.plain import PlainUpdate
from sparring.errors import UserError
from sparring.objectives import CAT, FAT, MART, OBJECTIVES, TRADES, Madry
from sparring.seeds import Draw, generator
from sparring.training import loop, run_folder
from sparring.training.config import Config, with_objective

ATTACK = {"eps": 0.1, "step_size": 0.03, "steps": 2}
EXACT = {**ATTACK, "start": None}  # no random start: a batch in parts is attacked as a whole one


def made(norm: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(0.0)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 4)).train()


def batch(count: int = 8):
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 4


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in found)
    return found


@pytest.mark.parametrize(
    ("name", "smoothing"), [*((name, 0.0) for name in OBJECTIVES), ("fat", 0.1), ("trades", 0.1), ("mart", 0.1)]
)
def test_gradients_are_those_of_the_packages_loop(tmp_path, monkeypatch, name, smoothing):
    """Bit for bit at the second epoch's second step, whose tau, k and history are not the first one's."""
    data = load("digits")
    data = replace(data, train=Split(data.train.x[:120], data.train.y[:120]))
    config = Config(epochs=2, batch_size=32, validation=24, lr=0.05, label_smoothing=smoothing)
    numbers = {} if name == "standard" else {**ATTACK, "start": "uniform"}
    numbers |= {"tau": "0,1@50%"} if name in ("fat", "fat-trades", "fat-mart") else {}
    config = with_objective(config, name, **numbers)
    calls = []
    real = PlainUpdate.__call__

    def spied(self, x, x_adv, y, *rest):
        calls.append((copy.deepcopy(self.model), x.clone(), y.clone()))
        loss = real(self, x, x_adv, y, *rest)
        calls[-1] += ([parameter.grad.clone() for parameter in self.model.parameters()], loss)
        return loss

    monkeypatch.setattr(PlainUpdate, "__call__", spied)
    loop.train(config, tmp_path / "run", data=data, tensorboard=False)
    model, x, y, expected, loss = calls[4]  # three steps an epoch
    assert y.is_floating_point() == (smoothing > 0)
    history = run_folder.read_metrics(tmp_path / "run")[:1]
    draws = generator("cpu", config.seed, Draw.ATTACK, 2, 1)
    modes = [module.training for module in model.modules()]
    step = config.objective(model, x, y, progress=(1 + 1 / 3) / 2, generator=draws, history=history)
    step.loss.backward()
    assert torch.equal(step.loss, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert modes == [module.training for module in model.modules()]


def test_modes_of_all_submodules_stay():
    model, (x, y) = made(), batch()
    model[1].eval()  # a frozen batch-norm
    before, statistics = [module.training for module in model.modules()], model[1].running_mean.clone()
    FAT(**ATTACK)(model, x, y).loss.backward()
    assert [module.training for module in model.modules()] == before
    assert torch.equal(model[1].running_mean, statistics)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.005),
    ],
)
def test_any_optimiser_learns(make):
    model, (x, y) = made(), batch()
    optimizer, fat, losses = make(model.parameters()), FAT(**ATTACK), []
    for epoch in range(20):
        step = fat(model, x, y, progress=epoch / 20, generator=seeded())
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
        losses.append(step.loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("kind", [Madry, FAT, TRADES, MART])
def test_autocast(kind):
    """Every weight gets a gradient, near that of full precision; TRADES runs the model without gradients first."""
    x, y = batch()
    plain, cast = made(), made()
    objective = kind(**ATTACK)
    objective(plain, x, y, generator=seeded()).loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = objective(cast, x, y, generator=seeded())
    step.loss.backward()
    assert step.x_adv.dtype == torch.float32
    for one, other in zip(gradients(plain)[-2:], gradients(cast)[-2:], strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.95


@pytest.mark.parametrize("kind", [FAT, MART])
def test_accumulated_gradients_of_two_halves_are_those_of_the_batch(kind):
    x, y = batch()
    whole, parts = made(norm=False), made(norm=False)
    objective = kind(**EXACT)
    objective(whole, x, y).loss.backward()
    for rows in (slice(0, 4), slice(4, 8)):
        (objective(parts, x[rows], y[rows]).loss / 2).backward()
    for one, other in zip(gradients(whole), gradients(parts), strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_module():
    x, y = batch()
    plain, model = made(), made()
    compiled = torch.compile(model, backend="eager")
    steps = [FAT(**ATTACK)(each, x, y, generator=seeded()) for each in (plain, compiled)]
    for step in steps:
        step.loss.backward()
    assert model.training and compiled.training and torch.equal(steps[0].x_adv, steps[1].x_adv)
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        torch.testing.assert_close(one, other)


def in_a_group(rank: int, world: int, store: str, pipe) -> None:
    """A step through DDP with this process's share of the batch; its gradients go to the pipe."""
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    x, y = batch()
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    wrapped, inside = DistributedDataParallel(made(norm=False)), []
    wrapped.register_forward_pre_hook(lambda *_: inside.append(wrapped.training))
    MART(**EXACT)(wrapped, x[mine], y[mine]).loss.backward()
    assert inside == [True, True]  # two calls of the loss, none of the attack
    assert all(module.training for module in wrapped.modules())
    found = [parameter.grad.tolist() for parameter in wrapped.parameters()]
    wrapped = DistributedDataParallel(made())
    for _ in range(2):  # with statistics, which the wrapper exchanges, and a second step
        MART(**EXACT)(wrapped, x[mine], y[mine]).loss.backward()
    pipe.send(found)
    # Destroying a group that a wrapper still holds can wait for ever: its thread needs the lock that the wait holds.
    os._exit(0)


@pytest.mark.parametrize("world", [1, 2])
def test_distributed_data_parallel(tmp_path, world):
    """Through the wrapper, gradients are the mean over the processes: those of the whole batch."""
    processes, store = multiprocessing.get_context("forkserver"), str(tmp_path / "store")
    pipes = [processes.Pipe(duplex=False) for _ in range(world)]
    children = [
        processes.Process(target=in_a_group, args=(rank, world, store, pipes[rank][1]), daemon=True)
        for rank in range(world)
    ]
    for child in children:
        child.start()
    try:
        found = [here.recv() if here.poll(90) else None for here, _ in pipes]
    finally:
        for child in children:
            child.kill()
            child.join()
    model, (x, y) = made(norm=False), batch()
    MART(**EXACT)(model, x, y).loss.backward()
    for gradients_there in found:
        assert gradients_there is not None
        for parameter, gradient in zip(model.parameters(), gradients_there, strict=True):
            torch.testing.assert_close(parameter.grad, torch.tensor(gradient), rtol=1e-4, atol=1e-6)


def test_wrong_soft_targets_are_refused():
    model, (x, y) = made(), batch()
    for wrong in (y.float(), soft_targets(y, 4)[:3], soft_targets(y, 4) * 2, soft_targets(y, 4) - 0.5):
        with pytest.raises(UserError, match="soft targets must"):
            FAT(**ATTACK)(model, x, wrong)
    with pytest.raises(UserError, match="int64"):
        FAT(**ATTACK)(model, x, y.int())


def test_a_share_is_one_number_or_one_per_image():
    y = torch.tensor([0, 1, 2])
    one = soft_targets(y, 4, other=y.flip(0), share=0.25)
    assert torch.equal(one, soft_targets(y, 4, other=y.flip(0), share=torch.full((3,), 0.25)))
    assert one.tolist() == [[0.25, 0, 0.75, 0], [0, 1, 0, 0], [0.75, 0, 0.25, 0]]
    for wrong in (1.5, "0.3", torch.ones(2), torch.tensor(0.3)):
        with pytest.raises(UserError, match=r"share must be a number in \[0, 1\], or a tensor with one for each of 3"):
            soft_targets(y, 4, other=y.flip(0), share=wrong)


class TwoInTraining(nn.Module):
    """An auxiliary output in train mode, as some published networks have."""

    def __init__(self):
        super().__init__()
        self.net = made()

    def forward(self, x):
        logits = self.net(x)
        return (logits, logits) if self.training else logits


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_the_loss_cannot_take_is_one_line(name):
    objective, (x, y) = OBJECTIVES[name](**({} if name == "standard" else ATTACK)), batch()
    with pytest.raises(UserError, match=r"to logits of shape .*got tuple. Wrap it to return the logits alone"):
        objective(TwoInTraining().train(), x, y)
    with pytest.raises(UserError, match=r"soft targets are of 5 classes, the model has 4.*soft_targets\(y, 4\)"):
        objective(made(), x, soft_targets(y, 5))
    with pytest.raises(UserError, match="the model has 4 classes, found label 5"):
        objective(made(), x, y + 2)
    with pytest.raises(UserError, match="does not accept images of shape"):
        objective(made(), x[..., 1:], y)


def test_an_error_of_the_loss_itself_stays():
    class Broken(FAT):
        def loss(self, *given):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Broken(**ATTACK)(made(), *batch())


def test_progress_may_be_a_number_of_numpy_and_a_wrong_history_is_refused():
    model, (x, y) = made(), batch()
    assert FAT(**ATTACK, tau="0,1@40%")(model, x, y, progress=np.float32(0.5)).loss.isfinite()
    for wrong in ([{}], [0.5], 3):
        with pytest.raises(UserError, match=r'history must hold {"own": accuracy} for every finished epoch'):
            CAT(**ATTACK)(model, x, y, history=wrong)
