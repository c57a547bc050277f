"""Processes that train together, as torchrun starts them: on this machine, with gloo, and bounded in time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATIENCE = 120.0  # seconds after which a group that has not ended is killed


def free_port() -> int:
    with socket.socket() as open_socket:
        open_socket.bind(("127.0.0.1", 0))
        return int(open_socket.getsockname()[1])


def _member(rank: int, size: int, port: int, out: str, pipe: Any, work: Callable[..., Any], args: Any) -> None:
    where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"})
    if out:
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    try:
        found = work(*args)
    except BaseException as error:
        text = str(error) if type(error).__module__.startswith("sparring") else traceback.format_exc()
        pipe.send((type(error).__name__, text, getattr(error, "elsewhere", None)))
        sys.stderr.flush()
        os._exit(1)
    pipe.send(found)
    sys.stdout.flush()
    os._exit(0)


@dataclass
class Group:
    """Running processes. Used as a context, it leaves none behind."""

    members: list[Any]
    pipes: list[Any]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *raised: object) -> None:
        for member in self.members:
            member.kill()
            member.join()

    def wait_until(self, there: Callable[[], bool], patience: float = _PATIENCE) -> None:
        """Wait until something is there; fail where a process ends first."""
        end = time.monotonic() + patience
        while not there():
            assert time.monotonic() < end and all(member.is_alive() for member in self.members)
            time.sleep(0.005)

    def results(self, patience: float = _PATIENCE) -> list[Any]:
        """What every process returned or raised, in order; None for one that was killed or is killed now."""
        end, found = time.monotonic() + patience, []
        for pipe in self.pipes:
            received = None
            with contextlib.suppress(EOFError):  # it has ended without a word
                received = pipe.recv() if pipe.poll(max(0.0, end - time.monotonic())) else None
            found.append(received)
        for member in self.members:
            member.join(max(0.0, end - time.monotonic()))
        return found


def start(size: int, work: Callable[..., Any], *args: Any, out: Path | str = "") -> Group:
    """Start `work(*args)` in `size` processes; what they print goes to the file `out`."""
    processes = multiprocessing.get_context("forkserver")
    port, pipes, members = free_port(), [], []
    for rank in range(size):
        here, there = processes.Pipe(duplex=False)
        given = (rank, size, port, str(out), there, work, args)
        members.append(processes.Process(target=_member, args=given, daemon=True))
        members[-1].start()
        there.close()
        pipes.append(here)
    return Group(members, pipes)


def run(size: int, work: Callable[..., Any], *args: Any, out: Path | str = "") -> list[Any]:
    """What `work(*args)` returned or raised in each of `size` processes."""
    with start(size, work, *args, out=out) as group:
        return group.results()
