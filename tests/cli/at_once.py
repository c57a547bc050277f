"""Commands that truly run at the same time, each in a process of its own: they wait for one another at the start."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.cli import main
from tests.cli.conftest import Outcome

_PATIENCE = 60.0  # seconds after which what has not ended is killed


@dataclass
class Command:
    """A running command; `outcome` waits for its end."""

    process: Any
    folder: Path

    @property
    def running(self) -> bool:
        return bool(self.process.is_alive())

    def outcome(self) -> Outcome:
        self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        texts = [(self.folder / name).read_text() for name in ("out", "err")]
        return Outcome(self.process.exitcode, *texts)


def _work(
    words: Sequence[str], cwd: str, folder: str, others: Sequence[str], prepare: Callable[[], None] | None
) -> None:
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    try:
        if prepare is not None:
            prepare()
        (Path(folder) / "ready").touch()
        while not all((Path(other) / "ready").exists() for other in others):
            time.sleep(0.001)
        code = main(list(words))
    except BaseException:  # as the interpreter would
        traceback.print_exc()
        code = 1
    os._exit(code)


def start(
    *commands: Sequence[object], cwd: Path, notes: Path, prepare: Callable[[], None] | None = None
) -> list[Command]:
    """Start the commands at the same moment; what they print goes to folders in `notes`."""
    processes, found = multiprocessing.get_context("forkserver"), []
    first = len(list(notes.glob("*")))
    folders = [notes / str(first + number) for number in range(len(commands))]
    for folder in folders:
        folder.mkdir(parents=True)
        for name in ("out", "err"):
            (folder / name).touch()
    for words, folder in zip(commands, folders, strict=True):
        given = ([str(word) for word in words], str(cwd), str(folder), [*map(str, folders)], prepare)
        process = processes.Process(target=_work, args=given, daemon=True)
        process.start()
        found.append(Command(process, folder))
    return found


def run(*commands: Sequence[object], **more: Any) -> list[Outcome]:
    """The outcomes of commands that run at the same time."""
    return [command.outcome() for command in start(*commands, **more)]
