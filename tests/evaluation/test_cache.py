from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

from sparring.errors import UserError
from sparring.evaluation import Part, PGDAttack, Protocol, evaluate
from sparring.evaluation import evaluator as measuring
from sparring.evaluation.cache import fingerprint

PROTOCOL = Protocol("p", "", 0.15, (PGDAttack("pgd3", 3, Part(2)), PGDAttack("cw3", 3, Part(2), loss="cw")))


def run(trained, store, **more):
    given = {"seeds": 2, "batch_size": 50, "doubts": False, **more}
    return evaluate(trained.model, trained.x, trained.y, PROTOCOL, store=store, **given)


@pytest.fixture
def climbs(monkeypatch):
    """One entry per attacked batch."""
    calls = []
    real = measuring.pgd_from
    monkeypatch.setattr(measuring, "pgd_from", lambda *a, **k: calls.append(1) or real(*a, **k))
    return calls


def test_known_verdicts_are_not_computed_again(trained, tmp_path, climbs):
    first = run(trained, tmp_path)
    assert len(climbs) == 2 * 2 * 4
    climbs.clear()
    again = run(trained, tmp_path, batch_size=33)
    assert not climbs
    assert [r.correct.tolist() for r in first] == [r.correct.tolist() for r in again]
    assert again["pgd3"].seconds == first["pgd3"].seconds
    run(trained, tmp_path, seeds=3)
    assert len(climbs) == 2 * 4  # only the third seed


def test_an_interrupted_evaluation_continues(trained, tmp_path, monkeypatch):
    whole = run(trained, None)
    real, calls = measuring.pgd_from, []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(measuring, "pgd_from", dies)
    with pytest.raises(KeyboardInterrupt):
        run(trained, tmp_path)
    resumed = run(trained, tmp_path)
    assert len(calls) == 16 + 1
    assert [r.correct.tolist() for r in whole] == [r.correct.tolist() for r in resumed]


KILLED = """
import sys, time, torch
from pathlib import Path
from torch import nn
from sparring.evaluation import PGDAttack, Part, Protocol, evaluate
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        nn.init.constant_(self.fc.bias, 0.0)
        self.fc.weight.data.copy_(torch.arange(12.0).view(3, 4).sin())
    def forward(self, x):
        time.sleep(float(sys.argv[2]))
        return self.fc(x.flatten(1))
x = torch.arange(400.0).view(100, 1, 2, 2).cos().abs()
y = torch.arange(100) % 3
p = Protocol("p", "", 0.1, (PGDAttack("pgd3", 3, Part(2)),))
r = evaluate(Slow(), x, y, p, batch_size=2, store=Path(sys.argv[1]), doubts=False)
print(r["pgd3"].correct.tolist())
"""


def test_a_killed_evaluation_continues(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), "0.01"])
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and process.poll() is None and _judged(tmp_path) < 10:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    known = _judged(tmp_path)
    assert 10 <= known < 100
    resumed, fresh = _here(tmp_path, monkeypatch), _here(tmp_path / "fresh", monkeypatch)
    assert torch.equal(resumed["pgd3"].correct, fresh["pgd3"].correct)
    assert _judged(tmp_path) == 100


def _here(folder, monkeypatch):
    """The same script in this process: another interpreter would take seconds to start."""
    monkeypatch.setattr(sys, "argv", ["", str(folder), "0"])
    scope: dict = {}
    with torch.random.fork_rng():
        exec(KILLED, scope)
    return scope["r"]


def _judged(folder) -> int:
    found = list(folder.glob("*/pgd3-*.npz"))
    return int(np.load(found[0])["judged"].sum()) if found else 0


def test_another_model_or_other_images_are_not_mixed_in(trained, tmp_path, climbs):
    run(trained, tmp_path)
    climbs.clear()
    other = copy.deepcopy(trained.model)
    other.fc.bias.data += 1e-3
    evaluate(other, trained.x, trained.y, PROTOCOL, store=tmp_path, doubts=False, batch_size=50)
    assert len(climbs) == 8
    evaluate(trained.model, trained.x[:100], trained.y[:100], PROTOCOL, store=tmp_path, doubts=False, batch_size=50)
    assert len(climbs) == 8 + 4
    run(trained, tmp_path, eps=0.1, seeds=1)
    run(trained, tmp_path, precision="bf16", seeds=1)
    assert len(climbs) == 8 + 4 + 8 + 8


class Scaled(nn.Module):
    """The same weights, and another function by an attribute that is no parameter."""

    def __init__(self, inside, by):
        super().__init__()
        self.inside, self.by = inside, by

    def forward(self, x):
        return self.by * self.inside(x)


def test_another_function_with_the_same_weights_is_not_mixed_in(trained, tmp_path, climbs):
    def accuracy(by):
        model = Scaled(trained.model, by)
        return evaluate(model, trained.x, trained.y, PROTOCOL, store=tmp_path, doubts=False)["natural"].accuracy

    found = [accuracy(by) for by in (1.0, -1.0, 1.0, 1.0 + 1e-6, -1.0)]
    assert found[0] == found[2] == found[3] > 0.8 and found[1] == found[4] < 0.1
    assert len(climbs) == 2 * 2  # each of the two once
    (one, two) = sorted(tmp_path.iterdir())
    assert two.name == f"{one.name}-2"
    (one / "logits.npy").write_bytes(b"no array")
    assert accuracy(1.0) == found[0] and len(list(tmp_path.iterdir())) == 3
    assert len(climbs) == 3 * 2


def test_the_fingerprint_covers_weights_structure_images_and_labels(trained):
    one = fingerprint(trained.model, trained.x, trained.y)
    assert one == fingerprint(copy.deepcopy(trained.model), trained.x.clone(), trained.y.clone())
    assert one != fingerprint(nn.Sequential(trained.model), trained.x, trained.y)
    assert one != fingerprint(trained.model, trained.x.flip(0), trained.y)
    assert one != fingerprint(trained.model, trained.x, trained.y.flip(0))


@pytest.mark.parametrize("size", [100, 0])
def test_a_damaged_file_is_named(trained, tmp_path, size):
    run(trained, tmp_path)
    damaged = next(tmp_path.glob("*/cw3-*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:size])
    with pytest.raises(UserError, match=r"is damaged\. Delete it"):
        run(trained, tmp_path)


def test_a_plain_function_cannot_be_stored(trained, tmp_path):
    with pytest.raises(UserError, match=r"only the evaluation of an nn\.Module can be resumed"):
        evaluate(lambda x: trained.model(x), trained.x, trained.y, PROTOCOL, store=tmp_path, doubts=False)
