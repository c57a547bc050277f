"""Several runs side by side on one GPU: a single run leaves it partly idle, and the paper reports medians over trials.

Under NVIDIA's MPS, where it is installed, their kernels run at the same time; without it they take turns. Threads of
one process gained less. Up to rounding, a run computes what it would compute alone.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparring.errors import RunFailed, UserError
from sparring.training.run_folder import AT_ONCE

_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_LOOK = 0.1  # seconds between two looks at the processes


def _silent(line: str) -> None:
    """Print nothing."""


def fair_share(count: int) -> int:
    """Per cent of a GPU's multiprocessors for each of `count` runs: two runs share each multiprocessor.

    With all multiprocessors for every run, small kernels that could run side by side wait for each other; with one run
    to each, they leave idle what others could use (results/engine/gpu-shares-h200.json).
    """
    return min(100, max(1, 200 // count))


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None  # None: it was asked to stop, or never started
    complaint: str = ""  # the last line that it complained with


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    device: torch.device,
    share: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = _silent,
) -> bool:
    """Run commands side by side until all have ended; returns False where `stop` ended them.

    Once `stop` returns True they get SIGTERM, on which `sparring` saves its place, and are awaited.

    Args:
        share: per cent of the GPU's multiprocessors that each may use, under MPS; `fair_share` unless given.
        tell: called with every line they print, from threads.

    Raises:
        RunFailed, UserError: one of them failed (UserError where it ended with 2); the others were asked to stop. The
            message is the last line it complained with.
        BrokenPipeError: raised by `tell`; all have stopped.
    """
    ended = run_queue(
        commands,
        at_once=len(commands),
        device=device,
        share=share,
        stop=stop,
        tell=lambda number, line: tell(line),
        until_failure=True,
    )
    for each in ended:
        if each.code:  # with the exit status of the command itself
            raise UserError(each.complaint) if each.code == 2 else RunFailed(each.complaint)
    return all(each.code == 0 for each in ended)


def run_queue(
    commands: Sequence[Sequence[str]],
    *,
    at_once: int,
    device: torch.device,
    share: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[int, str], None] = lambda number, line: None,
    until_failure: bool = False,
) -> list[Ended]:
    """Run commands in order, at most `at_once` side by side; returns how each of them ended.

    Once `stop` returns True, or with `until_failure` one of them has failed, no other is started, and those that run
    get SIGTERM and are awaited.

    Args:
        tell: called with the number of a command and a line that it printed, from threads.

    Raises:
        BrokenPipeError: raised by `tell`; all have stopped.
    """
    count = min(at_once, len(commands))
    with one_gpu(device) as shared, tempfile.TemporaryDirectory() as folder:
        environment = _environment(shared, count, share)
        complaints = [Path(folder) / f"{number}.txt" for number in range(len(commands))]
        processes: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        broken: list[BrokenPipeError] = []

        def start() -> None:
            number = len(processes)
            processes.append(_start(commands[number], complaints[number], environment))
            reads = (processes[-1], functools.partial(tell, number), broken)
            readers.append(threading.Thread(target=_read, args=reads, daemon=True))
            readers[-1].start()

        def ends(codes: Sequence[int | None]) -> bool:
            return (until_failure and any(codes)) or bool(broken) or stop()

        try:
            asked = _await(processes, start, len(commands), count, ends)
        finally:
            for process in processes:
                process.kill()  # left running by an exception only
                process.wait()
            for reader in readers:
                reader.join()
        if broken:
            raise broken[0]
        ended = [_ended(process, complaints[number], number in asked) for number, process in enumerate(processes)]
        return ended + [Ended(None)] * (len(commands) - len(processes))


def _environment(shared: dict[str, str], count: int, share: int | None) -> dict[str, str]:
    """The environment of `count` processes that share a device and the cores."""
    environment = {**os.environ, **shared, "PYTHONUNBUFFERED": "1", AT_ONCE: str(count)}
    if share is not None:
        environment[_SHARE] = str(share)
    else:  # an explicit setting of the caller's wins
        environment.setdefault(_SHARE, str(fair_share(max(1, count))))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, count))))
    return environment


def _ended(process: subprocess.Popen[str], complaints: Path, asked: bool) -> Ended:
    if process.returncode == 0:
        return Ended(0)
    if asked:
        return Ended(None)
    said = _last_line(complaints) or f"one of the processes ended with exit status {process.returncode}."
    return Ended(process.returncode, said)


def _start(command: Sequence[str], complaints: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start in a process group of its own: the parent passes on a Ctrl-C."""
    with complaints.open("w") as file:
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )


def _await(
    processes: Sequence[subprocess.Popen[str]],
    start: Callable[[], None],
    total: int,
    at_once: int,
    ends: Callable[[Sequence[int | None]], bool],
) -> list[int]:
    """Start commands and wait until all have ended; returns the numbers of those that were asked to stop."""
    asked: list[int] | None = None
    while True:
        codes = [process.poll() for process in processes]
        running = [number for number, code in enumerate(codes) if code is None]
        waiting = len(processes) < total and asked is None
        if not running and not waiting:
            return asked or []
        if asked is None and ends(codes):
            asked = running
            for number in asked:
                processes[number].terminate()
        elif waiting and len(running) < at_once:
            start()
            continue
        time.sleep(_LOOK)


def _read(process: subprocess.Popen[str], tell: Callable[[str], None], broken: list[BrokenPipeError]) -> None:
    """Pass on what is printed. Where the reader is gone, close the pipe, so that the process notices."""
    assert process.stdout is not None
    with process.stdout:
        try:
            for line in process.stdout:
                tell(line.rstrip("\n"))
        except BrokenPipeError as error:
            broken.append(error)


def _last_line(complaints: Path) -> str:
    lines = complaints.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("sparring: ") if lines else ""


@contextmanager
def one_gpu(device: torch.device) -> Iterator[dict[str, str]]:
    """Environment variables for processes that share a GPU; MPS runs for the time of the block.

    Empty where there is no MPS, where it cannot be started, or where it runs already.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if device.type != "cuda" or control is None or _PIPES in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        shared = {_PIPES: folder, _LOGS: folder}
        environment = os.environ | shared
        # Its output is discarded: a pipe would be held open by the daemon, and waited for.
        unheard: dict[str, Any] = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if subprocess.run([control, "-d"], **unheard).returncode:
            yield {}
            return
        try:
            yield shared
        finally:
            subprocess.run([control], input="quit\n", text=True, **unheard)
