"""Fixtures to run commands as a user does: words in; exit code, output and errors out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from sparring.cli import main

# About a second: digits with few steps and large batches. Later flags override earlier ones.
QUICK = ["fat-digits", "--epochs", "2", "--batch-size", "256", "--attack.steps", "2", "--no-tensorboard"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command."""

    code: int
    out: str
    err: str

    def user_error(self, *parts: str) -> None:
        """Assert a user error: exit code 2, and one line on standard error that contains these parts."""
        assert self.code == 2, self
        self.one_line(*parts)

    def one_line(self, *parts: str) -> None:
        assert self.err.startswith("sparring: ") and self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        for part in parts:
            assert part in self.err, self.err


Command = Callable[..., Outcome]


@pytest.fixture
def sparring(capsys, tmp_path, monkeypatch) -> Command:
    """`sparring WORDS` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as leaving:  # --help
            code = int(leaving.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run


def start(*words: object, cwd: Path, **options: object) -> subprocess.Popen[str]:
    """`sparring WORDS` in a new process with default signal handlers (nohup and a shell's & ignore signals)."""

    def listen() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sparring", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, preexec_fn=listen, **pipes)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A finished run folder; tests must not write to it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", *QUICK, "--out", str(folder)]) == 0
    return folder


def write_images(top: Path, count: int = 300) -> Path:
    """Digits as PNG files, one folder per class."""
    digits = load_digits()
    for i in range(count):
        folder = top / f"digit {digits.target[i]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[i] * 255 / 16).astype(np.uint8)).save(folder / f"{i}.png")
    return top
