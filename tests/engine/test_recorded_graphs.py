"""The engine as on a GPU: attacks and updates are captured, replayed, and equal to what runs uncaptured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparring.attacks.losses import soft_targets
from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.cuda_graphs import Captured, NotCapturable
from sparring.engine.ema import WeightAverage
from sparring.engine.select import prepare
from sparring.engine.update.step import FastUpdate
from sparring.models import build
from sparring.objectives import OBJECTIVES, KTauPGD
from tests.engine.recorded_graphs import simulate

CPU = torch.device("cpu")
SHAPE, CLASSES, BATCH = (3, 8, 8), 4, 8


@pytest.fixture
def graphs(monkeypatch):
    return simulate(monkeypatch)


# The simulation itself: each of these would pass unnoticed if a replay were a call.


def test_capture_changes_nothing_and_replay_runs_no_python(graphs):
    x, number, calls = torch.ones(3), [1.0], []

    def work():
        calls.append(1)
        x.mul_(2).add_(number[0])

    captured = Captured(work, "pool", warm_up=1)
    assert x.tolist() == [3.0] * 3 and len(calls) == 2  # the warm-up
    number[0] = 100.0
    captured()
    assert x.tolist() == [7.0] * 3 and len(calls) == 2


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: x.add_(torch.tensor([1.0])),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_waiting_for_the_device_is_refused(graphs, work):
    x = torch.ones(3)
    with pytest.raises(NotCapturable, match="makes the host wait"):
        Captured(lambda: work(x), "pool")


def test_memory_that_nobody_holds_is_overwritten(graphs):
    x, kept = torch.ones(3), {}

    def work():
        kept["held"] = x * 2
        kept["view"] = (x * 3)[:1]
        x.copy_(x * 5)

    captured = Captured(work, "pool", warm_up=0)
    captured()
    assert x.tolist() == [5.0] * 3
    assert kept["held"].tolist() == [2.0] * 3 and kept["view"].tolist() == [3.0]
    assert graphs.overwritten == 2  # after the capture and after the replay


# Updates.


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(dropout), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6 * 64, CLASSES)).train()


def batches(count, soft=False, last=0):
    draw = torch.Generator().manual_seed(1)
    for index in range(count):
        images = last if last and index % 2 else BATCH
        x = torch.rand(images, *SHAPE, generator=draw)
        y = torch.randint(0, CLASSES, (images,), generator=draw)
        yield x, (x + 0.03).clamp(0, 1), soft_targets(y, CLASSES, smoothing=0.1) if soft else y


def groups(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02}]


OPTIMISERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "groups": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "adamw groups": lambda m: torch.optim.AdamW(groups(m), lr=0.1),
}


def updated(optimiser, *, objective="madry", clip=0.0, soft=False, awp=0.0, last=0, dropout=0.0, steps=6):
    """Everything that updates move: weights, statistics, moments and the average."""
    model = network(dropout)
    optimizer = OPTIMISERS[optimiser](model)
    average = WeightAverage(model, 0.9)
    fast = FastUpdate(
        model,
        optimizer,
        OBJECTIVES[objective]().loss,
        batch=BATCH,
        shape=SHAPE,
        device=CPU,
        half=False,
        compiled=False,
        after=average.move,
        also=list(average.state().values()),
        soft=CLASSES if soft else 0,
        clip=clip,
    )
    torch.manual_seed(5)
    losses = []
    for step, batch in enumerate(batches(steps, soft, last)):
        losses.append(fast(*batch, 0.05 / (step + 1), awp).clone())
    assert not fast.failed()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*losses, *model.state_dict().values(), *state, *average.state().values()], fast


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


CASES = [{"optimiser": name} for name in OPTIMISERS]
CASES += [{"optimiser": name, "clip": 0.1, "soft": True} for name in ("momentum", "adamw groups")]
CASES += [{"optimiser": name, "awp": 0.01} for name in ("momentum", "adamw")]
CASES += [{"optimiser": "adamw", "last": 5}, {"optimiser": "momentum", "last": 5, "awp": 0.01, "soft": True}]
CASES += [{"optimiser": "momentum", "objective": name} for name in OBJECTIVES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case.values()))
def test_replayed_updates_are_the_updates(graphs, case):
    with pytest.MonkeyPatch.context() as none:
        none.setattr("sparring.engine.update.step.pool_for", lambda device: None)
        theirs, _ = updated(**case)
    ours, fast = updated(**case)
    assert not fast.not_captured and graphs.captures == (2 if "last" in case else 1)
    assert graphs.replays >= 5 and graphs.overwritten
    same(ours, theirs)


def test_replayed_dropout_draws_anew_every_time(graphs):
    """As the uncaptured update does: the warm-up of a capture shifts no draw."""
    with pytest.MonkeyPatch.context() as none:
        none.setattr("sparring.engine.update.step.pool_for", lambda device: None)
        theirs, _ = updated("momentum", dropout=0.5)
    ours, _ = updated("momentum", dropout=0.5)
    same(ours, theirs)


def test_replayed_update_that_is_not_finite_changes_nothing(graphs):
    for name in OPTIMISERS:
        model = network()
        optimizer = OPTIMISERS[name](model)
        given = {"batch": BATCH, "shape": SHAPE, "device": CPU, "half": False, "compiled": False}
        fast = FastUpdate(model, optimizer, OBJECTIVES["madry"]().loss, after=lambda: None, **given)
        x, x_adv, y = next(batches(1))
        fast(x, x_adv, y, 0.1)
        before = copy.deepcopy([*model.parameters(), *fast.descent.state])
        fast(x, torch.full_like(x, torch.nan), y, 0.1)
        assert fast.failed()
        same([*model.parameters(), *fast.descent.state], before)


# Attacks.


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("project", [True, False])
def test_replayed_attacks_are_the_attack(graphs, norm, loss, project):
    model = network().eval()
    attack = CapturedAttack(model, BATCH, SHAPE, CLASSES, device=CPU, every=3)
    draw = torch.Generator().manual_seed(2)
    for tau, count in ((0, BATCH), (2, BATCH), (5, BATCH), (1, 5), (0, 1)):
        x = torch.rand(count, *SHAPE, generator=draw)
        y = model(x).argmax(dim=1)
        y[::3] = (y[::3] + 1) % CLASSES
        eps = 0.02 * (1 + tau) * (10 if norm == "l2" else 1)  # numbers in memory: nothing is captured again
        given = {"eps": eps, "step_size": eps / 3, "steps": 5, "tau": tau, "noise": 0.01}
        pgd = KTauPGD(**given, loss=loss, norm=norm, start="uniform" if project else None, project=project)
        ours = attack(pgd, x, y, torch.Generator().manual_seed(tau))
        plain = pgd(model, x, y, torch.Generator().manual_seed(tau))
        assert torch.equal(ours.backprops, plain.backprops)
        assert torch.allclose(ours.x_adv, plain.x_adv, atol=1e-6)
    assert graphs.captures == len(attack.sizes) + (loss == "kl")


# The whole engine.


class Attention(nn.Module):
    """A small vision transformer: patches, LayerNorm, attention, GELU."""

    def __init__(self):
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, 16, 4, stride=4), nn.Parameter(torch.zeros(1, 4, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.block(self.patches(x).flatten(2).mT + self.place).mean(1))


class Branches(nn.Module):
    """Asks the device for a number: it cannot be captured."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x) * (2.0 if x.mean().item() > -1 else 1.0)


NETWORKS = {
    "transformer": Attention,
    "tiny_cnn": lambda: build("tiny_cnn", num_classes=CLASSES, channels=3, size=(8, 8)),
    "wrn-10-1-silu": lambda: build("wrn-10-1-silu", num_classes=CLASSES),
    "asks": Branches,
}


def trained(make, *, norm="linf", ema=0.9):
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"batch": BATCH, "shape": SHAPE, "classes": CLASSES, "device": CPU, "half": False, "norm": norm}
    engine = prepare(model, optimizer, OBJECTIVES["madry"]().loss, kind="fast", ema=ema, **given)
    eps = 0.5 if norm == "l2" else 0.03
    backprops = []
    for step, (x, _, y) in enumerate(batches(5, last=5)):
        search = KTauPGD(eps=eps, step_size=eps / 3, steps=4, tau=step % 2, loss="ce", start="uniform", norm=norm)
        found = engine.attack(search, x, y, torch.Generator().manual_seed(step))
        backprops.append(found.backprops.clone())
        engine.update(x, found.x_adv, y, 0.01 / (step + 1))
    return [*backprops, *model.state_dict().values(), *engine.judged().model.state_dict().values()], engine


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", NETWORKS)
def test_replayed_training_is_the_training(graphs, name, norm):
    make = NETWORKS[name]
    with pytest.MonkeyPatch.context() as none:
        for module in ("update.step", "attack.runner", "attack_path"):
            none.setattr(f"sparring.engine.{module}.pool_for", lambda device: None)
        theirs, _ = trained(make, norm=norm)
    assert graphs.captures == 0
    ours, engine = trained(make, norm=norm)
    same(ours, theirs)
    if name == "asks":
        assert "makes the host wait for the GPU" in engine.line and graphs.replays == 0
    else:
        assert graphs.captures > 3 and graphs.replays > 10
