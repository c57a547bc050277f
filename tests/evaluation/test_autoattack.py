from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from pyautoattack import AutoAttack
from torch import nn

from sparring.attacks.autoattack import Claim
from sparring.errors import UserError
from sparring.evaluation import autoattack as module
from sparring.evaluation import evaluate

EPS = 0.1


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10)).eval()


def batch(n: int = 40):
    x = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = net()(x).argmax(1)
    y[::10] = (y[::10] + 1) % 10  # some are misclassified without attack
    return x, y


def test_the_verdicts_equal_those_of_pyautoattack():
    model, (x, y) = net(), batch(15)
    package = AutoAttack(net().requires_grad_(False), eps=EPS, device="cpu", seed=0)
    with torch.random.fork_rng():
        x_adv, _ = package.run_standard_evaluation(x, y, batch_size=500)
        with torch.no_grad():
            theirs = net()(x_adv).argmax(1) == y
    state = torch.get_rng_state()
    result = evaluate(model, x, y, ["autoattack", "quick"], eps=EPS, doubts=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    ours = result["autoattack"]
    assert torch.equal(ours.correct, theirs)
    assert 0 < ours.accuracy < result["pgd10"].accuracy + 0.02
    assert (ours.correct <= result["natural"].correct).all()
    assert (result["worst"].correct <= (ours.correct & result["pgd10"].correct)).all()
    after = ours.detail["accuracy_after"]
    assert ours.detail["version"] == "standard" and list(after) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert sorted(after.values(), reverse=True) == list(after.values()) and after["square"] == ours.accuracy


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x) + 0.01 * torch.randn(len(x), 10)


def test_a_stochastic_model_is_attacked_by_the_rand_version():
    x, y = batch(12)
    record = evaluate(Noisy(), x, y, "autoattack", eps=EPS, doubts=False)["autoattack"]
    assert record.detail["version"] == "rand"
    assert list(record.detail["accuracy_after"]) == ["apgd-ce", "apgd-dlr"]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("images", [1, 12])
def test_logits_that_are_not_finite_are_a_doubt(broken, images):
    def model(x):
        logits = net()(x).clone()
        logits[:images] = broken
        return logits

    result = evaluate(model, *batch(12), "autoattack", eps=EPS, batch_size=12)
    assert "logits-not-finite" in [doubt["name"] for doubt in result.doubts]
    assert result["autoattack"].detail["version"] == "standard"


def fake_part(calls: list[tuple[str, bool, list[int]]], breaks: dict[str, dict[bool, set[int]]]):
    """A fake pyautoattack that breaks the examples in `breaks`, {part: examples}, numbered by their first pixel."""

    def part(name, model, x, y, *, eps, norm, version, seed, each_call):
        exact = isinstance(model, nn.Module)
        numbers = x[:, 0, 0, 0].mul(100).round().int().tolist()
        calls.append((name, exact, numbers))
        claimed = torch.tensor([number in breaks.get(name, {}).get(exact, set()) for number in numbers])
        # A pixel of exactly 1 in the corner fools the model below.
        x_adv = x.clone()
        x_adv[claimed, 0, 3, 3] = 1.0 if exact else 0.99
        return Claim(x_adv, claimed)

    return part


@pytest.fixture
def played(monkeypatch):
    """The calls of the fake attack, and what it breaks."""
    calls, breaks = [], {}
    monkeypatch.setattr(module, "attack_part", fake_part(calls, breaks))
    return calls, breaks


class Corner(nn.Module):
    """Correct unless the corner is 1. The fake attack claims success at 0.99 in bf16, which fp32 does not confirm."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        fooled = (x[:, 0, 3, 3] == 1.0).float()
        return torch.stack([1 - fooled, fooled, 0 * fooled, 0 * fooled - 1], dim=1) + 0 * self.unused


def corner_images(n: int = 10):
    x = torch.full((n, 1, 4, 4), 0.5)
    x[:, 0, 0, 0] = torch.arange(n) / 100
    return x, torch.zeros(n, dtype=torch.int64)


def test_only_unbroken_examples_are_attacked(played):
    calls, breaks = played
    breaks["apgd-ce"] = {True: {1, 2}}
    breaks["fab-t"] = {True: {5}}
    record = evaluate(Corner(), *corner_images(), "autoattack", eps=EPS, doubts=False, batch_size=6)["autoattack"]
    assert [n for n, right in enumerate(record.correct) if not right] == [1, 2, 5]
    seen = {name: sorted(n for part, _, ns in calls if part == name for n in ns) for name in ("apgd-ce", "square")}
    assert seen["apgd-ce"] == list(range(10))
    assert seen["square"] == [0, 3, 4, 6, 7, 8, 9]


def test_a_bf16_success_that_fp32_does_not_confirm_is_repeated_in_fp32(played, tmp_path):
    calls, breaks = played
    breaks["apgd-ce"] = {False: {1, 2, 3}, True: {2}}  # all three broken in bf16 only; fp32 finds a real break of 2
    given = {"eps": EPS, "doubts": False, "precision": "bf16", "store": tmp_path}
    record = evaluate(Corner(), *corner_images(), "autoattack", **given)["autoattack"]
    assert [n for n, right in enumerate(record.correct) if not right] == [2]
    assert [ns for part, exact, ns in calls if part == "apgd-ce" and exact] == [[1, 2, 3]]
    assert [ns for part, exact, ns in calls if part == "apgd-t"] == [[0, 1, 3, 4, 5, 6, 7, 8, 9]]
    assert record.detail["retried_in_fp32"] == 3
    again = evaluate(Corner(), *corner_images(), "autoattack", **given)["autoattack"]
    assert again.detail["retried_in_fp32"] == 3


class Beyond(Corner):
    """Correct unless the corner is at least 0.59; the fake attack claims success before that."""

    def forward(self, x):
        return super().forward((x >= 0.59).to(x.dtype))


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.1)])
def test_a_claim_that_holds_at_the_edge_of_the_ball_is_not_repeated(monkeypatch, norm, eps):
    """Of two points on the way to the boundary, as FAB's are, one goes the right way; fp32 has the other again."""
    calls = []

    def part(name, model, x, y, **_settings):
        numbers = x[:, 0, 0, 0].mul(100).round().int()
        calls.append((name, isinstance(model, nn.Module), numbers.tolist()))
        x_adv = x.clone()
        x_adv[numbers == 3, 0, 3, 3] += 0.02
        x_adv[numbers == 7, 0, 3, 3] -= 0.02
        return Claim(x_adv, (numbers == 3) | (numbers == 7) if name == "fab-t" else y < 0)

    monkeypatch.setattr(module, "attack_part", part)
    given = {"eps": eps, "norm": norm, "doubts": False, "precision": "bf16"}
    record = evaluate(Beyond(), *corner_images(), "autoattack", **given)["autoattack"]
    assert [n for n, right in enumerate(record.correct) if not right] == [3]
    assert [ns for name, exact, ns in calls if name == "fab-t" and exact] == [[7]]
    assert record.detail["retried_in_fp32"] == 1


IN_SEVERAL_BATCHES = [  # the first pass in bf16; what fp32 does not confirm at once, in half batches
    ([0, 1, 2, 3, 4], False),
    ([5, 6, 7, 8, 9], False),
    ([1, 2], True),
    ([8], True),
]


@contextmanager
def stopped(monkeypatch, when):
    """An evaluation that is stopped before the call of a part for which `when(name)` is true."""
    playing = module.attack_part

    def dies(name, *args, **kwargs):
        if when(name):
            raise KeyboardInterrupt
        return playing(name, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "attack_part", dies)
        yield


def interrupted(played, store, monkeypatch, after: int):
    """A bf16 evaluation with doubtful examples in both batches, stopped after so many calls of the first part."""
    calls, breaks = played
    breaks["apgd-ce"] = {False: {1, 2, 8}, True: {8}}
    given = {"eps": EPS, "doubts": False, "precision": "bf16", "batch_size": 5}
    with stopped(monkeypatch, lambda _: len(calls) == after):
        evaluate(Corner(), *corner_images(), "autoattack", store=store, **given)
    assert of_the_first_part(calls) == IN_SEVERAL_BATCHES[:after]
    calls.clear()
    return lambda store: evaluate(Corner(), *corner_images(), "autoattack", store=store, **given)["autoattack"]


def of_the_first_part(calls):
    return [(numbers, exact) for part, exact, numbers in calls if part == "apgd-ce"]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_continued_run_attacks_what_is_doubtful_in_fp32_only(played, tmp_path, monkeypatch, after):
    calls, _ = played
    evaluated = interrupted(played, tmp_path, monkeypatch, after)
    continued = evaluated(tmp_path)
    assert of_the_first_part(calls) == IN_SEVERAL_BATCHES[after:]
    calls.clear()
    whole = evaluated(None)
    assert of_the_first_part(calls) == IN_SEVERAL_BATCHES
    assert [n for n, right in enumerate(whole.correct) if not right] == [8]
    assert torch.equal(continued.correct, whole.correct)
    for name in ("accuracy_after", "retried_in_fp32"):
        assert continued.detail[name] == whole.detail[name]
    assert continued.detail["retried_in_fp32"] == 3


def test_verdicts_of_a_file_without_the_doubtful_are_kept(played, tmp_path, monkeypatch):
    calls, _ = played
    evaluated = interrupted(played, tmp_path, monkeypatch, after=2)
    (path,) = tmp_path.glob("*/*-apgd-ce.npz")
    with np.load(path) as found:
        older = {name: found[name] for name in found.files if name != "doubtful"}
        assert np.flatnonzero(found["doubtful"]).tolist() == [1, 2, 8]
    np.savez(path, **older)
    record = evaluated(tmp_path)
    assert of_the_first_part(calls) == [([1, 2, 8], False), ([1, 2], True), ([8], True)]
    assert [n for n, right in enumerate(record.correct) if not right] == [8]


def test_examples_that_only_bf16_misclassifies_are_attacked_in_fp32(played, monkeypatch):
    calls, breaks = played
    breaks["apgd-ce"] = {True: {4}}
    real = module._seen_right
    monkeypatch.setattr(module, "_seen_right", lambda model, x, y: real(model, x, y) & (x[:, 0, 0, 0] != 0.04))
    given = {"eps": EPS, "doubts": False, "precision": "bf16"}
    record = evaluate(Corner(), *corner_images(), "autoattack", **given)["autoattack"]
    assert ("apgd-ce", True, [4]) in calls
    assert not record.correct[4] and record.correct.sum() == 9


def test_an_interrupted_autoattack_continues(played, tmp_path, monkeypatch):
    calls, breaks = played
    breaks["apgd-ce"] = {True: {1}}
    breaks["fab-t"] = {True: {8}}
    given = {"eps": EPS, "doubts": False, "batch_size": 5, "store": tmp_path}
    with stopped(monkeypatch, lambda name: name == "fab-t" and [call[0] for call in calls].count("fab-t") == 1):
        evaluate(Corner(), *corner_images(), "autoattack", **given)
    calls.clear()
    record = evaluate(Corner(), *corner_images(), "autoattack", **given)["autoattack"]
    assert [n for n, right in enumerate(record.correct) if not right] == [1, 8]
    assert [(name, ns) for name, _, ns in calls] == [
        ("fab-t", [6, 7, 8, 9]),
        ("square", [0, 2, 3, 4]),
        ("square", [5, 6, 7, 9]),
    ]


def test_images_that_square_cannot_attack_are_refused_at_once(played):
    calls, _ = played
    with pytest.raises(UserError, match=r"Square needs images of shape \(n, channels, height, width\), got \(6, 16\)"):
        evaluate(net(), torch.rand(6, 16), torch.zeros(6, dtype=torch.int64), "autoattack", eps=EPS, doubts=False)
    assert not calls
