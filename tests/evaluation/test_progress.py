"""Without a terminal an evaluation reports its progress, a line a minute."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager

import pytest
import torch

from sparring.evaluation import Part, PGDAttack, Protocol, estimate, evaluate, evaluator, progress

PROTOCOL = Protocol("one", "", 0.1, (PGDAttack("pgd2", 2, Part(4)),))


@pytest.fixture
def often(monkeypatch):
    """A line every hundredth of a second."""
    monkeypatch.setattr(progress, "EVERY", 0.01)


class Waiting(torch.nn.Module):
    """The trained model; the attack's first call, which is the first with a gradient, waits for a line."""

    def __init__(self, model: torch.nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__()
        self.model, self.capsys, self.heard = model, capsys, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patience = 1000  # ten seconds: a missing line fails the test instead of hanging it
        while x.requires_grad and "pgd2" not in self.heard and patience:
            self.heard += self.capsys.readouterr().out
            threading.Event().wait(0.01)
            patience -= 1
        return self.model(x)


def test_progress_is_logged_before_a_batch_is_done(trained, often, capsys):
    model = Waiting(trained.model, capsys).eval()
    evaluate(model, trained.x[:40], trained.y[:40], PROTOCOL, batch_size=10, doubts=False, progress=True)
    lines = (model.heard + capsys.readouterr().out).splitlines()
    assert any(line.startswith("pgd2 seed 0: 0 of 40 images, after 0 min") for line in lines), lines
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(report)")]


def test_progress_is_logged_during_the_sanity_checks(trained, often, capsys):
    evaluate(trained.model, trained.x[:40], trained.y[:40], PROTOCOL, progress=True)
    assert "sanity checks, after 0 min" in capsys.readouterr().out


def test_without_progress_nothing_is_printed(trained, often, capsys):
    evaluate(trained.model, trained.x[:40], trained.y[:40], PROTOCOL)
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_does_not_stop_the_work(often, monkeypatch):
    def gone(*words, **options):
        tried.set()
        raise BrokenPipeError

    tried = threading.Event()
    monkeypatch.setattr("builtins.print", gone)
    with progress.meter(True) as task:
        task("pgd20", 100)(50)
        assert tried.wait(10)
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(report)")]


def test_a_bar_moves_at_every_step_and_ends_at_the_number_of_images():
    moved = []
    by_step = progress.BySteps(moved.append, steps=4)
    for _ in range(3):  # a batch that did not fit into memory, in its fourth step
        by_step(8)
    for half in (4, 4):
        for _ in range(4):
            by_step(half)
        by_step.finish(half)
    assert moved[:3] == [2, 2, 2] and moved[3:7] == [1, 1, 1, 1]
    assert sum(moved) == 8


def test_every_step_of_an_attack_is_counted(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(progress.BySteps, "__call__", lambda self, images: seen.append(images))
    evaluate(trained.model, trained.x[:40], trained.y[:40], PROTOCOL, batch_size=20, doubts=False)
    assert seen == [20, 20] * 2


def test_autoattack_moves_within_a_batch_and_ends_at_the_number_of_images(trained, monkeypatch):
    """In two batches, of which many images break; some only in bf16, which are attacked again."""
    moved: dict[str, list[float]] = {}

    @contextmanager
    def seen(shown):
        yield lambda what, total: moved.setdefault(f"{what} {total}", []).append

    monkeypatch.setattr(evaluator, "meter", seen)
    x, y = trained.x[:8], trained.y[:8]
    record = evaluate(trained.model, x, y, "autoattack", precision="bf16", batch_size=4, doubts=False)["autoattack"]
    left = int((trained.model(x).argmax(1) == y).sum())
    assert left > 4
    for part, accuracy in record.detail["accuracy_after"].items():
        steps = moved[f"AutoAttack {part} {left}"]
        assert len(steps) > 50 and sum(steps) == pytest.approx(left)
        left = round(8 * accuracy)


def test_how_long_it_takes_is_said_beforehand(trained, monkeypatch, capsys):
    monkeypatch.setattr(estimate, "_SHORT", 0.0)
    evaluate(trained.model, trained.x[:40], trained.y[:40], PROTOCOL, doubts=False, progress=True)
    assert re.match(r"about \d+ s on this machine \(\d+ threads?\)\n", capsys.readouterr().out)
