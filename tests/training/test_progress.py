"""The progress of a training: lines in a log, a bar on a terminal, the time left, and a note on dead models."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

from rich.console import Console
from torch import nn

from sparring import models
from sparring.data import load
from sparring.training import progress
from sparring.training.loop import train
from sparring.training.progress import TrainingBar
from sparring.training.validation import predicts_one_class

EPOCH = {"epoch": 1, "tau": None, "loss": 2.3, "natural": 0.1, "pgd10": 0.1} | {
    "backprops": 1.0,
    "seconds": 1.0,
    "images_per_second": 9.0,
}


def output_of(small, folder, *, terminal, **options) -> str:
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=120, color_system=None)
    train(small, folder, tracker=TrainingBar(console, **options), tensorboard=False)
    return printed.getvalue()


def test_a_log_has_one_line_per_epoch_and_no_bar(tmp_path, small):
    lines = output_of(small, tmp_path / "run", terminal=False).splitlines()
    assert lines[0].startswith("engine: ")
    assert lines[1] == "validation after every epoch: 120 held-out images, natural and under PGD-10 at eps 0.3"
    assert [line[:9] for line in lines[2:]] == ["epoch   1", "epoch   2", "epoch   3"]
    assert all(word in lines[2] for word in ("loss", "natural", "PGD-10", "BPs", "tau 2", "images/s", "best"))


def test_a_terminal_has_a_bar_with_the_time_left_and_bps(tmp_path, small):
    printed = output_of(small, tmp_path / "run", terminal=True, title="FAT ")
    assert "FAT epoch 1/3" in printed and "FAT epoch 3/3" in printed
    assert "ETA 0:00:0" in printed and " BPs" in printed and "100%" in printed


def test_lines_can_be_left_out(small):
    printed = io.StringIO()
    bar = TrainingBar(Console(file=printed, force_terminal=False, width=120), lines=False)
    bar.begin(small, steps=4, epoch=1, engine="engine: plain")
    bar.step(1, 1, lambda: 6.5)
    bar.epoch(EPOCH, best=True)
    bar.end()
    assert printed.getvalue() == ""


def test_a_log_gets_a_line_per_minute_in_a_long_epoch(small, monkeypatch):
    ticks = itertools.count(0.0, 25.0)  # seconds per step
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    printed, reads = io.StringIO(), []
    bar = TrainingBar(Console(file=printed, force_terminal=False, width=120), title="FAT ")
    bar.begin(small, steps=4, epoch=1, engine="engine: plain")
    for epoch, step in itertools.product((1, 2), range(1, 5)):
        bar.step(epoch, step, lambda: reads.append(None) or 6.54)
    bar.end()
    assert printed.getvalue().splitlines()[2:] == [
        "FAT epoch 1/3  step 3 of 4  6.5 BPs  0:03:45 left",
        "FAT epoch 2/3  step 2 of 4  6.5 BPs  0:02:30 left",
    ]
    assert len(reads) == 2  # each synchronises with the GPU


def test_the_time_left_of_a_resumed_training_uses_its_own_speed(small, monkeypatch):
    ticks = iter([0.0, 500.0, 561.0])  # the first step includes compilation
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    printed = io.StringIO()
    bar = TrainingBar(Console(file=printed, force_terminal=False, width=120))
    bar.begin(small, steps=100, epoch=3, engine="engine: plain")
    for step in (97, 98):  # resumed within an epoch
        bar.step(3, step, lambda: 10.0)
    assert printed.getvalue().splitlines()[2:] == [
        "epoch 3/3  step 97 of 100  10.0 BPs  -:--:-- left",
        "epoch 3/3  step 98 of 100  10.0 BPs  0:02:02 left",
    ]


def test_a_model_that_predicts_one_class_gets_one_note(tmp_path, small, monkeypatch):
    monkeypatch.setattr(models, "build", lambda *args, **facts: Dead())
    lines = output_of(small, tmp_path / "run", terminal=False).splitlines()
    assert [line[:9] for line in lines[2:]] == ["epoch   1", "epoch   2", "note: for", "epoch   3"]
    assert "one class for every validation image" in lines[4] and "--seed" in lines[4]


def test_the_note_needs_consecutive_epochs():
    printed = io.StringIO()
    bar = TrainingBar(Console(file=printed, width=300))
    for epoch, constant in enumerate((True, False, True), 1):
        bar.epoch({**EPOCH, "epoch": epoch, **({"one_class": True} if constant else {})}, best=False)
    assert "note" not in printed.getvalue()


class Dead(nn.Module):
    """A model whose only hidden unit is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = nn.Linear(64, 1)
        self.out = nn.Linear(1, 10)
        nn.init.constant_(self.dead.bias, -1e6)

    def forward(self, x):
        return self.out(self.dead(x.flatten(1)).relu())


def test_one_class_means_one_prediction_for_all_images():
    held = load("digits").test
    assert predicts_one_class(Dead(), held)
    assert not predicts_one_class(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), held)
    assert not predicts_one_class(Dead(), held.head(1))  # a single image proves nothing
    dropping = nn.Sequential(Dead(), nn.Dropout(0.99))
    assert predicts_one_class(dropping, held) and dropping.training  # measured in eval mode; the mode is restored
