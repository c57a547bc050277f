"""Optimisers: by name or the caller's own, with exact resume, and refusals in one line before a folder is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import sparring
from sparring.data import Split, load
from sparring.errors import UserError
from sparring.training import checkpoint, loop, optimisers, run_folder
from sparring.training.loop import Interrupted
from sparring.training.optimiser_state import facts as state_facts
from tests.training.test_loop import same_run


@pytest.fixture(scope="module")
def tiny(small):
    """Two epochs of five steps, one step of the attack."""
    objective = replace(small.objective, steps=1)
    return replace(small, epochs=2, objective=objective, lr=0.02, validation=30, batch_size=32)


@pytest.fixture(scope="module")
def few():
    """190 digits."""
    data = load("digits")
    return replace(data, train=Split(data.train.x[:190], data.train.y[:190]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny, few):
    """The folder of an uninterrupted run of an engine with some changes, trained once."""
    folders: dict[tuple[str, str], Path] = {}

    def run(name: str, engine: str) -> Path:
        if (name, engine) not in folders:
            folders[name, engine] = tmp_path_factory.mktemp("whole") / "run"
            config = replace(tiny, **NAMED[name])
            loop.train(config, folders[name, engine], data=few, tensorboard=False, engine=engine)
        return folders[name, engine]

    return run


def two_rates(parameters):
    """RMSprop with a smaller rate for vectors, and a count that is a plain number."""
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "lr": 2e-4, "momentum": 0.5}]
    return torch.optim.RMSprop(groups, lr=2e-3, centered=True)


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls by its own counts: a plain number per parameter, and one of the group."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "taken": 0, "betas": (0.5, 0.25)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["seen"] = state.get("seen", torch.zeros(1, dtype=torch.int64)) + 3
                length = state["count"] + group["taken"] + float(state["seen"])
                parameter.add_(parameter.grad, alpha=-group["lr"] / length)


NAMED = {
    "sgd": {},
    "nesterov": {"nesterov": True, "lr": "warmup:50%+cosine:0.02"},
    "no-momentum": {"momentum": 0.0},
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "no_decay": True},
    "adam": {"optimizer": "adam", "lr": 1e-3, "clip": 0.1},
    "rmsprop": {"optimizer": "rmsprop", "lr": 1e-4},
    "clip": {"clip": 0.1, "no_decay": True, "ema": 0.9},
    "smooth": {"label_smoothing": 0.2, "awp": 0.005},
}
OWN = {
    "rmsprop": two_rates,
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "counting": Counting,
}


def stopped_and_resumed(config, folder: Path, **how) -> Path:
    """Train, stop after three steps of the second epoch, and resume to the end."""
    steps = iter(range(1000))
    with pytest.raises(Interrupted):
        loop.train(config, folder, tensorboard=False, stop=lambda: next(steps) == 7, **how)
    loop.train(config, folder, resume=True, tensorboard=False, **how)
    return folder


CASES = [*((name, "plain") for name in NAMED), ("nesterov", "fast"), ("adamw", "fast"), ("clip", "fast")]


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_named_optimiser_resumes_exactly(tmp_path, tiny, few, whole, name, engine):
    config = replace(tiny, **NAMED[name])
    same_run(whole(name, engine), stopped_and_resumed(config, tmp_path / "parts", data=few, engine=engine))


@pytest.mark.parametrize("name", OWN)
def test_own_optimiser_resumes_exactly(tmp_path, tiny, few, name):
    config, own = replace(tiny, ema=0.9), {"optimizer": OWN[name], "own_lr": True, "data": few}
    loop.train(config, tmp_path / "whole", tensorboard=False, **own)
    same_run(tmp_path / "whole", stopped_and_resumed(config, tmp_path / "parts", **own))
    facts = checkpoint.load(tmp_path / "parts" / run_folder.LAST).facts["optimizer"]
    if name == "counting":
        assert facts["groups"][0]["taken"] == 10 and facts["groups"][0]["betas"] == [0.5, 0.25]
        assert {values["count"] for values in facts["values"].values()} == {10}


@pytest.mark.parametrize("name", ["nesterov", "adamw", "rmsprop", "clip", "smooth"])
def test_engines_agree(whole, name):
    """The fast engine runs SGD and Adam itself, any other one as it is."""
    plain, fast = (checkpoint.load(whole(name, kind) / run_folder.LAST).part("model") for kind in ("plain", "fast"))
    for key in plain:
        torch.testing.assert_close(fast[key], plain[key], rtol=1e-2, atol=2e-3, msg=lambda m, key=key: f"{key}: {m}")


def test_every_setting_reaches_the_update(whole):
    """No two of them end at the same weights."""
    ends = [checkpoint.load(whole(name, "plain") / run_folder.LAST).part("model")["conv1.weight"] for name in NAMED]
    assert not any(torch.equal(one, other) for index, one in enumerate(ends) for other in ends[:index])


def test_own_rate_and_given_schedule(tmp_path):
    """Without `lr` the optimiser's own rate stays; with one, groups keep their ratio to the first."""
    quick = {"epochs": 1, "batch_size": 512, "device": "cpu", "objective": sparring.Standard()}
    seen = []

    def make(parameters):
        seen.append(two_rates(parameters))
        return seen[-1]

    sparring.train("fat-digits", tmp_path / "own", optimizer=make, **quick)
    config = run_folder.open_run(tmp_path / "own").config
    assert (config.optimizer, str(config.lr)) == ("own:RMSprop", "0.002")
    assert [group["lr"] for group in seen[0].param_groups] == pytest.approx([2e-3, 2e-4])
    sparring.train("fat-digits", tmp_path / "given", optimizer=make, lr=0.01, **quick)
    assert str(run_folder.open_run(tmp_path / "given").config.lr) == "0.01"
    assert [group["lr"] for group in seen[1].param_groups] == pytest.approx([0.01, 0.001])
    named = sparring.Config(lr="0.03", validation=100, **{k: v for k, v in quick.items() if k != "device"})
    sparring.train(named, tmp_path / "config", optimizer=make, device="cpu")
    assert str(run_folder.open_run(tmp_path / "config").config.lr) == "0.03"
    sparring.train("fat-digits", tmp_path / "name", optimizer="adamw", lr=1e-3, **quick)
    assert run_folder.open_run(tmp_path / "name").config.optimizer == "adamw"


def test_own_optimiser_must_be_given_again(tmp_path, tiny, few):
    config = replace(tiny, epochs=1)
    loop.train(config, tmp_path / "run", data=few, tensorboard=False, optimizer=OWN["rmsprop"], own_lr=True)
    kept = run_folder.open_run(tmp_path / "run").config
    with pytest.raises(UserError, match=r"the caller's own \(RMSprop\).* Give it again from Python"):
        loop.train(kept, tmp_path / "run", data=few, resume=True)
    with pytest.raises(UserError, match="optimizer own:RMSprop -> own:AdamW"):
        loop.train(config, tmp_path / "run", data=few, resume=True, optimizer=OWN["adamw"])
    other = lambda p: torch.optim.RMSprop([{"params": p[:1]}, {"params": p[1:]}], lr=2e-3, alpha=0.5)  # noqa: E731
    with pytest.raises(UserError, match=r"another optimiser \(.*alpha 0.99 -> 0.5.*\). Give the one it had"):
        loop.train(config, tmp_path / "run", data=few, resume=True, optimizer=other, own_lr=True)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "parameters that are not the model's. Write"),
        (lambda p: torch.optim.SGD(p[1:], lr=0.1), r"leaves out 1 of the model's \d+ .*\(conv1.weight\)"),
        (lambda p: torch.optim.SGD(p[2:], lr=0.1), r"leaves out 2 .*\(conv1.weight, ...\)"),
        (lambda p: None, "must return a torch optimiser, got NoneType"),
        (lambda p: torch.optim.SGD(p, lr=-1.0), r"cannot be made of the model's parameters \(ValueError: Invalid"),
        (lambda p: [][1], r"cannot be made of the model's parameters \(IndexError: list index out of range\). Write"),
        (lambda: None, "cannot be made of the model's parameters"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients only"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS evaluates the loss several times"),
        (lambda p: torch.optim.SGD(p, lr=0.0), "must have a positive lr"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "must be a name or a function .*, got a SGD. Write"),
        (3, "must be a name or a function of the parameters, got 3"),
        ("sdg", "unknown optimizer 'sdg'. Did you mean 'sgd'"),
        ("own:Lion", r"an optimiser of the caller's own \(Lion\)"),
    ],
)
def test_wrong_optimiser_is_refused_before_a_folder_is_made(tmp_path, optimizer, message):
    with pytest.raises(UserError, match=message) as caught:
        sparring.train("fat-digits", tmp_path / "run", optimizer=optimizer, device="cpu")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [{"weight_decay": 0.1}, {"momentum": 0.5}, {"nesterov": True}, {"no_decay": True}])
def test_a_number_that_ones_own_optimiser_would_not_see_is_refused(tmp_path, given):
    with pytest.raises(UserError, match=f"{next(iter(given))} is a number of the optimisers by name"):
        sparring.train("fat-digits", tmp_path / "run", optimizer=OWN["adamw"], device="cpu", **given)
    assert not (tmp_path / "run").exists()


def test_state_that_no_checkpoint_holds_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["past"] = [torch.zeros(2)]
    with pytest.raises(UserError, match=r"SGD keeps a list \(past\)"):
        state_facts(optimizer, model, None)


def test_decay_leaves_vectors_alone():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(3, 3))
    model[2].weight.requires_grad_(False)
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5, "nesterov": False}
    for name in optimisers.OPTIMIZERS:
        wide, narrow = optimisers.named(name, model, no_decay=True, **given).param_groups
        assert [tuple(p.shape) for p in wide["params"]] == [(2, 1, 3, 3)] and wide["weight_decay"] == 0.5
        assert len(narrow["params"]) == 4 and narrow["weight_decay"] == 0.0
        (group,) = optimisers.named(name, model, no_decay=False, **given).param_groups
        assert len(group["params"]) == 5


def test_a_rate_that_is_a_tensor_is_kept_as_a_number(tmp_path):
    quick = {"epochs": 1, "batch_size": 512, "device": "cpu", "objective": sparring.Standard(), "progress": False}
    rate = torch.tensor(0.25)
    sparring.train("fat-digits", tmp_path / "run", optimizer=lambda p: torch.optim.Adam(p, lr=rate), **quick)
    assert str(run_folder.open_run(tmp_path / "run").config.lr) == "0.25"
