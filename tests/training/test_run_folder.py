from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest
import torch

from sparring.errors import UserError
from sparring.training import held_folder, loop, run_folder


def test_create_and_open(tmp_path, small):
    folder = tmp_path / "a" / "b"
    run_folder.create(folder, small, "fat-digits")
    found = run_folder.open_run(folder)
    assert found.config == small
    assert found.recipe == "fat-digits"
    assert found.last() is None


def test_run_is_overwritten_only_on_request(tmp_path, small):
    run = run_folder.create(tmp_path, small, "one")
    run.save(run_folder.LAST, {"model.a": torch.ones(1)}, {})
    with pytest.raises(UserError, match=r"already holds a run\. Continue it with --resume"):
        run_folder.create(tmp_path, small, "two")
    assert run_folder.open_run(tmp_path).recipe == "one"
    (tmp_path / "notes.txt").write_text("mine")
    run_folder.create(tmp_path, small, "two", overwrite=True)
    assert run_folder.open_run(tmp_path).recipe == "two"
    assert run_folder.open_run(tmp_path).last() is None
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_other_folder_is_refused(tmp_path, small):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not a run folder"):
        run_folder.create(tmp_path, small, "")


def test_folder_that_cannot_be_created_is_a_user_error(tmp_path, small):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the folder"):
        run_folder.create(tmp_path / "file" / "run", small, "")


def test_opening_a_folder_without_a_run_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        run_folder.open_run(tmp_path)
    (tmp_path / run_folder.CONFIG).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        run_folder.open_run(tmp_path)


def test_truncated_line_is_dropped_and_metrics_are_trimmed(tmp_path, small):
    run = run_folder.create(tmp_path, small, "")
    for epoch in (1, 2, 3):
        run.record({"epoch": epoch})
    with (tmp_path / run_folder.METRICS).open("a") as file:
        file.write('{"epoch": 4, "lo')
    assert [record["epoch"] for record in run.metrics()] == [1, 2, 3]
    run.keep_metrics(2)
    assert (tmp_path / run_folder.METRICS).read_text() == '{"epoch": 1}\n{"epoch": 2}\n'


def test_temporary_files_are_swept_only_before_training(tmp_path, small):
    run_folder.create(tmp_path, small, "")
    (tmp_path / ".last.safetensors.123.tmp").write_bytes(b"half")
    run_folder.open_run(tmp_path)  # reading sweeps nothing: a training process may be writing
    assert list(tmp_path.glob(".*.tmp"))
    run_folder.sweep(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_folder_is_locked_during_training(tmp_path, small):
    code = """
import sys, time
from pathlib import Path
from sparring.training import held_folder
with held_folder.claimed(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""
    folder = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match="is in use by another training process"):
            loop.train(small, folder, tensorboard=False)
    finally:
        other.kill()
        other.communicate()
    with held_folder.claimed(folder):  # a dead process holds no lock
        assert list(folder.iterdir()) == []


def test_file_system_without_locks_works(tmp_path, monkeypatch):
    def none(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with held_folder.claimed(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_environment_has_one_entry_per_start_and_no_absolute_path(tmp_path, small, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/sparring", "train", "fat-digits"])
    run_folder.create(tmp_path, small, "")
    for _ in range(2):
        run_folder.note_environment(tmp_path, torch.device("cpu"))
    text = (tmp_path / run_folder.ENVIRONMENT).read_text()
    starts = json.loads(text)
    assert len(starts) == 2
    assert starts[0]["command"] == "sparring train fat-digits"
    assert starts[0]["torch"] == torch.__version__
    assert "/somewhere" not in text


@pytest.mark.parametrize(
    ("typed", "noted"),
    [
        (["/some/where/sparring/__main__.py", "train"], "sparring train"),
        (["bin/sweep.py", "--names", "rho 1"], "sweep.py --names 'rho 1'"),
    ],
)
def test_command_is_recorded_as_typed(typed, noted, monkeypatch):
    monkeypatch.setattr("sys.argv", typed)
    assert run_folder.environment(torch.device("cpu"))["command"] == noted


def test_stage_of_a_checkpoint():
    places = [{"epoch": 2}, {"epoch": 2, "step": 0}, {"epoch": 0, "step": 1}, {"epoch": 2, "step": 11}]
    expected = ["epoch 2", "epoch 2", "epoch 0 and 1 step", "epoch 2 and 11 steps"]
    assert [run_folder.stage(facts) for facts in places] == expected
