"""`sparring reproduce` as a user meets it, on digits."""

from __future__ import annotations

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparring import runs
from sparring.cli import reproduce
from sparring.recipes import paper
from sparring.reproduce import headline
from tests.reproduce.tiny import COURSE, TABLE

ITEMS = {item.name: item for item in (TABLE, COURSE, paper.find("fig-motivation"))}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same command, with items that take seconds."""
    monkeypatch.setattr(paper, "ITEMS", ITEMS)


def test_the_list(sparring):
    said = sparring("reproduce")
    assert said.code == 0
    for name in ITEMS:
        assert name in said.out
    assert "0/2" in said.out and "0/1" in said.out and "sparring reproduce ITEM" in said.out


def test_from_training_to_the_table(sparring):
    said = sparring("reproduce", "table-tiny")
    assert said.code == 0, said
    assert "wrote results/table-tiny/fat-lite-seed0.json" in said.out
    assert "wrote results/table-tiny/table.md" in said.out
    assert "89.34 ± 0.22" in said.out and "Tiny CNN, 2 epochs, 1 seed" in said.out and "n = 450 test images" in said.out
    assert "2/2" in sparring("reproduce").out
    result = json.loads(Path("results/table-tiny/fat-lite-seed0.json").read_text())
    assert f"{100 * result['found']['attacks']['pgd10']['accuracy']:.2f}" in said.out
    again = sparring("reproduce", "table-tiny")
    assert "training" not in again.out and "seed0.json" not in again.out and again.code == 0
    # The results alone are enough to draw; another folder has its own.
    Path("results/table-tiny/table.md").unlink()
    runs_before = sorted(Path("runs").rglob("*"))
    assert sparring("reproduce", "table-tiny", "--draw").code == 0
    assert Path("results/table-tiny/table.md").exists() and sorted(Path("runs").rglob("*")) == runs_before
    assert (
        "Nothing of table-tiny is measured yet" in sparring("reproduce", "table-tiny", "--draw", "--results", "r").out
    )
    # A try on fewer images uses the same run, and is kept apart.
    before = Path("results/table-tiny/table.md").read_text()
    said = sparring("reproduce", "table-tiny", "--limit", 16)
    assert "training" not in said.out and "n = 16 test images" in said.out
    assert (
        Path("results/table-tiny/limit16/table.md").exists()
        and Path("results/table-tiny/table.md").read_text() == before
    )


def test_everything_is_drawn_at_once(sparring, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(headline, "ROWS", {"table-tiny": ("madry", "fat")})
    shutil.copytree(measured / "results", tmp_path / "results")
    said = sparring("reproduce", "--draw")
    assert said.code == 0, said
    for name in ("table-tiny/table.md", "fig-tiny/fig-tiny.png", "headline.md"):
        assert f"wrote results/{name}\n" in said.out and (tmp_path / "results" / name).exists()
    assert "fig-motivation" not in said.out
    sparring("reproduce", "--draw", "--results", "none").mends(
        "no results in none", "sparring reproduce fig-motivation"
    )


def test_a_figure(sparring):
    said = sparring("reproduce", "fig-motivation")
    assert said.code == 0 and "wrote results/fig-motivation/fig-motivation.png" in said.out
    assert "Amidst the others" in said.out.replace("\n", " ")


def test_time_is_up_and_the_same_command_continues(sparring, monkeypatch):
    words = ("reproduce", "table-tiny", "--rows", "fat", "--limit", 16, "--max-minutes", 100)
    now = iter([*([0.0] * 5), *([1e6] * 1000)])  # the clock strikes after a few steps
    with monkeypatch.context() as patched:
        patched.setattr(reproduce.time, "monotonic", lambda: next(now))
        said = sparring(*words)
    assert said.code == 0, said
    assert "Time is up with 1 of 1 jobs left. The same command continues." in said.out
    begun = json.loads(Path("results/table-tiny/limit16/fat-lite-seed0.json").read_text())
    assert begun["state"] == "interrupted" and "epochs" in said.out
    said = sparring(*words)
    assert said.code == 0 and "Time is up" not in said.out
    assert json.loads(Path("results/table-tiny/limit16/fat-lite-seed0.json").read_text())["state"] == "measured"
    (folder,) = Path("runs/paper").iterdir()
    assert len(runs.read_environment(folder)) == 2


def test_the_clock_breaks_a_measurement_off():
    with pytest.raises(KeyboardInterrupt), reproduce._breakable(time.monotonic() + 0.05):
        time.sleep(30)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    before = signal.getsignal(signal.SIGINT)
    with reproduce._breakable(float("inf")):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_in_the_command_that_continues(sparring, monkeypatch):
    def stop(jobs, bench):
        raise reproduce.Stopped("in x: stopped in epoch 1 after step 2; saved")

    monkeypatch.setattr(reproduce, "carry_out", stop)
    said = sparring("reproduce", "table-tiny", "--seeds", 3)
    assert said.code == 1
    said.one_line("stopped in x", "Continue with: sparring reproduce table-tiny --seeds 3")


def test_the_plan(sparring):
    said = sparring("reproduce", "table-tiny", "--plan", "--seeds", 0, 1)
    assert said.code == 0 and said.out.count("missing") == 4 and "4 jobs" in said.out and not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["table-tinny"], ["unknown item 'table-tinny'", "Did you mean 'table-tiny'?"]),
        (["table-tiny", "--scale", "huge"], ["--scale", "lite", "full"]),
        (["table-tiny", "--rows", "fta"], ["no row 'fta'", "Did you mean 'fat'?"]),
        (["fig-motivation", "--scale", "full"], ["nothing at scale full", "--scale lite"]),
        (["table-tiny", "--limit", "0"], ["--limit", "at least 1"]),
        (["table-tiny", "--max-minutes", "0"], ["--max-minutes", "above 0"]),
        (["table-tiny", "--at-once", "0"], ["--at-once", "at least 1"]),
        (["table-tiny", "--seeds", "-1"], ["seeds count from 0"]),
        (["table-tiny", "--device", "tpu"], ["unknown device 'tpu'"]),
        (["table-tiny", "--result", "x"], ["--results"]),
    ],
)
def test_wrong_words(sparring, words, parts):
    sparring("reproduce", *words).mends(*parts)


def test_missing_data_and_a_missing_gpu(sparring, monkeypatch, tmp_path):
    far = {"data": "cifar10", "model": "resnet18", "epochs": 30}
    rows = tuple(replace(row, configs={"full": replace(row.configs["lite"], **far)}) for row in TABLE.rows)
    monkeypatch.setitem(ITEMS, "table-tiny", replace(TABLE, rows=rows))
    monkeypatch.setenv("SPARRING_DATA", str(tmp_path))
    sparring("reproduce", "table-tiny", "--scale", "full").mends("needs cifar10", "sparring data fetch cifar10")
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar10.npz").write_bytes(b"")
    if not torch.cuda.is_available():
        said = sparring("reproduce", "table-tiny", "--scale", "full")
        said.mends("needs a GPU", "--scale lite", "--rows", "--device cpu")
    assert not Path("runs").exists()


def test_a_damaged_result(sparring):
    Path("results/table-tiny").mkdir(parents=True)
    Path("results/table-tiny/fat-lite-seed0.json").write_text("{")
    sparring("reproduce", "table-tiny", "--draw").mends("fat-lite-seed0.json", "Delete it")
