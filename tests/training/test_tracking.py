"""TensorBoard's events: a failure to write them ends no run."""

from __future__ import annotations

import errno

import pytest

from sparring.training.tracking import TensorBoard

pytest.importorskip("tensorboard", reason="comes with pip install -e '.[dev]'")


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", "events.out")


def test_numbers_are_written(tmp_path):
    board = TensorBoard(tmp_path, 1)
    board.add({"epoch": 1, "natural": 0.5, "own": None})
    board.close()
    (path,) = tmp_path.glob("events.*")
    written = path.read_bytes()
    assert b"natural" in written and b"own" not in written


@pytest.mark.parametrize("broken", ["add_scalar", "close"])
def test_full_disk_ends_the_events_and_not_the_run(tmp_path, broken, monkeypatch, capsys):
    board = TensorBoard(tmp_path, 1)
    monkeypatch.setattr(board.writer, broken, full)
    for epoch in (1, 2):
        board.add({"epoch": epoch, "natural": 0.5})
    board.close()
    output = capsys.readouterr().err
    assert output == f"note: no more events for TensorBoard in {tmp_path}: No space left on device.\n"


def test_unwritable_folder_is_not_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", full)
    board = TensorBoard(tmp_path, 1)
    board.add({"epoch": 1})
    board.close()
    assert "no more events" in capsys.readouterr().err
