"""Where there is no terminal an evaluation says how far it is, a line a minute."""

from __future__ import annotations

import threading

import pytest
import torch

from sparring.evaluation import Part, PGDAttack, Protocol, evaluate, progress

PROTOCOL = Protocol("one", "", 0.1, (PGDAttack("pgd2", 2, Part(4)),))


@pytest.fixture
def often(monkeypatch):
    """A line every hundredth of a second."""
    monkeypatch.setattr(progress, "EVERY", 0.01)


class Waiting(torch.nn.Module):
    """The trained model; the attack's first call, after one probe and four natural batches, waits for a line."""

    def __init__(self, model: torch.nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__()
        self.model, self.capsys, self.calls, self.heard = model, capsys, 0, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        patience = 1000  # ten seconds: a line that never comes is to fail, not to hang
        while self.calls > 5 and "pgd2" not in self.heard and patience:
            self.heard += self.capsys.readouterr().out
            threading.Event().wait(0.01)
            patience -= 1
        return self.model(x)


def test_a_log_hears_how_far_an_attack_is_before_its_batch_is_done(trained, often, capsys):
    model = Waiting(trained.model, capsys).eval()
    evaluate(model, trained.x[:40], trained.y[:40], PROTOCOL, batch_size=10, doubts=False, progress=True)
    lines = (model.heard + capsys.readouterr().out).splitlines()
    assert any(line.startswith("pgd2 seed 0: 0 of 40 images, after 0 min") for line in lines), lines
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(tell)")]


def test_so_does_whoever_waits_for_the_doubts(trained, often, capsys):
    evaluate(trained.model, trained.x[:40], trained.y[:40], PROTOCOL, progress=True)
    assert "looking for doubts, after 0 min" in capsys.readouterr().out


def test_what_is_not_asked_for_is_not_told(trained, often, capsys):
    evaluate(trained.model, trained.x[:40], trained.y[:40], PROTOCOL)
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_has_gone_does_not_end_the_work(often, monkeypatch):
    def gone(*words, **options):
        told.set()
        raise BrokenPipeError

    told = threading.Event()
    monkeypatch.setattr("builtins.print", gone)
    with progress.meter(True) as task:
        task("pgd20", 100)(50)
        assert told.wait(10)
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(tell)")]
