"""Signals that stop a run: the flag, the line that announces it, handlers restored, and `sparring.train` in Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import sparring
from sparring.training import run_folder, signals
from sparring.training.signals import Flag, stopping
from tests.training.test_loop import same_run

# The second step of thirteen says so, and goes on once the signal has come.
PROGRAM = """
import sys
import sparring

class Second:
    def begin(self, config, *, steps, epoch, engine): ...
    def epoch(self, record, *, best): ...
    def end(self): ...
    def step(self, epoch, step, backprops):
        if step == 2:
            print("two", flush=True)
            sys.stdin.readline()

fat = sparring.FAT(eps=0.3, step_size=0.15, steps=2)
sparring.train("fat-digits", "run", objective=fat, epochs=2, batch_size=100, device="cpu", tracker=Second())
"""
QUICK = {"objective": sparring.FAT(eps=0.3, step_size=0.15, steps=2), "epochs": 2, "batch_size": 100, "device": "cpu"}


class Sends:
    """A tracker that sends signals to this process after a step."""

    def __init__(self, *numbers, step=1):
        self.numbers, self.at = numbers, step

    def begin(self, config, *, steps, epoch, engine):
        pass

    def step(self, epoch, step, backprops):
        for number in self.numbers if step == self.at else ():
            os.kill(os.getpid(), number)

    def epoch(self, record, *, best):
        if self.at == "end":
            os.kill(os.getpid(), self.numbers[0])

    def end(self):
        pass


def test_ctrl_c_saves_in_python_and_the_run_resumes_to_the_same_result(tmp_path):
    sparring.train("fat-digits", tmp_path / "whole", progress=False, **QUICK)
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & ignores it
    )
    assert child.stdout is not None and child.stdout.readline() == "two\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate("go on\n")
    assert err.splitlines()[-1] == (
        "KeyboardInterrupt: stopped in epoch 1 after step 2; saved. "
        "Continue with sparring.train(out='run', resume=True, device='cpu')"
    )
    assert (tmp_path / "run" / run_folder.LAST).exists() and not run_folder.read_metrics(tmp_path / "run")
    sparring.train(out=tmp_path / "run", resume=True, device="cpu", progress=False)
    same_run(tmp_path / "whole", tmp_path / "run")


def test_what_the_folder_cannot_hold_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    x, y = torch.rand(300, 1, 8, 8), torch.arange(300) % 10
    own = {"model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), "data": (x, y)}
    own["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    given = {"out": "run", "progress": False, "validation": 20, "tracker": Sends(signal.SIGTERM), **own, **QUICK}
    with pytest.raises(SystemExit) as stopped:
        sparring.train(**given)
    assert str(stopped.value) == (
        "sparring: stopped in epoch 1 after step 1; saved. Continue with "
        "sparring.train(out='run', resume=True, model=..., data=..., optimizer=..., device='cpu')"
    )
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    sparring.train(out="run", resume=True, device="cpu", progress=False, **own)
    assert len(run_folder.read_metrics(Path("run"))) == 2


def test_a_second_ctrl_c_ends_at_once_and_one_at_the_end_is_not_lost(tmp_path):
    given = {"progress": False, **QUICK, "epochs": 1}
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        sparring.train("fat-digits", tmp_path / "a", tracker=Sends(signal.SIGINT, signal.SIGINT), **given)
    assert not (tmp_path / "a" / run_folder.LAST).exists()
    with pytest.raises(KeyboardInterrupt, match="the run is finished"):
        sparring.train("fat-digits", tmp_path / "b", tracker=Sends(signal.SIGINT, step="end"), **given)
    sparring.load_model(tmp_path / "b")


def test_another_thread_takes_no_signals():
    def enter():
        with stopping() as stop:
            found.append((stop(), signal.getsignal(signal.SIGINT) == before))

    found, before = [], signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(False, True)]


def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stopping() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_only_a_second_ctrl_c_raises():
    flag = Flag()
    flag.raised(signal.SIGTERM, None)
    flag.raised(signal.SIGTERM, None)
    assert flag()
    with pytest.raises(KeyboardInterrupt):
        flag.raised(signal.SIGINT, None)


def test_stop_is_announced_once_and_immediately(capfd):
    flag = Flag()
    flag.raised(signal.SIGINT, None)
    assert capfd.readouterr().err == (
        "sparring: stopping after this step; press Ctrl-C again to stop at once, without saving\n"
    )
    flag.raised(signal.SIGTERM, None)
    assert capfd.readouterr().err == ""


def test_stop_works_with_closed_standard_error(monkeypatch):
    def closed(number, text):
        raise OSError

    monkeypatch.setattr(signals.os, "write", closed)
    flag = Flag()
    flag.raised(signal.SIGHUP, None)
    assert flag()
