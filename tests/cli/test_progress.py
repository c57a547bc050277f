from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

from rich.console import Console

from sparring.cli import progress
from sparring.cli.progress import TrainingBar
from sparring.train import train


def watched(small, folder, *, terminal, **options) -> str:
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=120, color_system=None)
    train(small, folder, watch=TrainingBar(console, **options), tensorboard=False)
    return printed.getvalue()


def test_a_log_has_one_line_an_epoch_and_no_bar(tmp_path, small):
    lines = watched(small, tmp_path / "run", terminal=False).splitlines()
    assert lines[0].startswith("engine: ")
    assert [line[:9] for line in lines[1:]] == ["epoch   1", "epoch   2", "epoch   3"]
    assert all(word in lines[1] for word in ("loss", "natural", "PGD-10", "BPs", "tau 2", "images/s", "best"))


def test_a_terminal_has_a_bar_with_the_time_left_and_bps(tmp_path, small):
    printed = watched(small, tmp_path / "run", terminal=True, title="FAT ")
    assert "FAT epoch 1/3" in printed and "FAT epoch 3/3" in printed
    assert "ETA 0:00:0" in printed and " BPs" in printed and "100%" in printed


def test_lines_can_be_left_out(tmp_path, small):
    assert watched(small, tmp_path / "run", terminal=False, lines=False) == ""


def test_a_log_hears_of_a_long_epoch_once_a_minute(small, monkeypatch):
    ticks = itertools.count(0.0, 25.0)  # seconds a step
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    printed, looks = io.StringIO(), []
    bar = TrainingBar(Console(file=printed, force_terminal=False, width=120), title="FAT ")
    bar.begin(small, steps=4, epoch=1, engine="engine: plain")
    for epoch, step in itertools.product((1, 2), range(1, 5)):
        bar.step(epoch, step, lambda: looks.append(None) or 6.54)
    bar.end()
    assert printed.getvalue().splitlines() == [
        "engine: plain",
        "FAT epoch 1/3  step 3 of 4  6.5 BPs  0:03:45 left",
        "FAT epoch 2/3  step 2 of 4  6.5 BPs  0:02:30 left",
    ]
    assert len(looks) == 2  # each makes a GPU wait


def test_the_time_left_of_a_resumed_training_is_of_its_own_speed(small, monkeypatch):
    ticks = itertools.count(0.0, 61.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    printed = io.StringIO()
    bar = TrainingBar(Console(file=printed, force_terminal=False, width=120))
    bar.begin(small, steps=4, epoch=3, engine="engine: plain")
    bar.step(3, 1, lambda: 10.0)
    assert printed.getvalue().splitlines()[1:] == ["epoch 3/3  step 1 of 4  10.0 BPs  0:03:03 left"]
