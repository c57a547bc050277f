from __future__ import annotations

import io

from rich.console import Console

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
