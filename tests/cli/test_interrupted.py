"""Ctrl-C ends every command with exit code 130 and one line, wherever it comes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from sparring import weights
from sparring.cli import bench, compare, demo, evaluate, report, reproduce
from sparring.cli import bound as bound_command
from sparring.paper import run as paper_run
from sparring.paper import specs
from tests.paper.tiny import COURSE, TABLE

# Command -> (its words after the run, the module and the name of what is interrupted).
COMMANDS = {
    "evaluate": (["--no-doubts"], evaluate, "evaluate"),
    "evaluate, opening": ([], evaluate, "open_subject"),
    "bound": (["--limit", "20"], bound_command, "estimate"),
    "report": ([], report, "open_run"),
    "report, writing": (["--strips", "0"], report, "write_page"),
    "compare": ([], compare, "open_run"),
    "export": ([], weights, "export"),
    "predict": (["image.png"], weights, "load"),
}


def interrupt(*given: object, **more: object) -> None:
    """What the terminal sends on Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


@pytest.fixture(autouse=True)
def listening(monkeypatch):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it may be ignored
    monkeypatch.setattr("sparring.training.signals._received", [])  # those that other tests have sent
    yield
    signal.signal(signal.SIGINT, previous)


def stopped(said) -> None:
    assert said.code == 130, said
    assert said.err.startswith("sparring: ") and said.err.count("\n") == 1 and "Traceback" not in said.out, said


@pytest.mark.parametrize("what", COMMANDS)
def test_commands_on_a_run(sparring, finished, tmp_path, monkeypatch, what):
    words, module, name = COMMANDS[what]
    monkeypatch.setattr(module, name, interrupt)
    run = shutil.copytree(finished, tmp_path / "run")
    stopped(sparring(what.partition(",")[0], run, *words))
    assert not list(Path().rglob(".*.tmp"))


@pytest.mark.parametrize("moment", ["_measure", "collect", "draw"])
def test_reproduce(sparring, monkeypatch, measured, moment):
    monkeypatch.setattr(specs, "ITEMS", {item.name: item for item in (TABLE, COURSE)})
    if moment == "_measure":
        monkeypatch.setattr(paper_run, "train_run", lambda job, workspace: None)
        monkeypatch.setattr(paper_run, "state", lambda job: "trained")
        monkeypatch.setattr(paper_run, moment, interrupt)
        stopped(sparring("reproduce", "table-tiny", "--device", "cpu"))
        return
    monkeypatch.setattr(reproduce, moment, interrupt)
    stopped(sparring("reproduce", "--draw", "--results", measured / "results"))


def test_bench_and_demo(sparring, monkeypatch):
    monkeypatch.setattr(bench, "_measure", interrupt)
    stopped(sparring("bench", "--device", "cpu"))
    monkeypatch.setattr(demo, "load", interrupt)
    stopped(sparring("demo", "--out", "demo"))
