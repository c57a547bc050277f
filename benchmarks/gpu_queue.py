"""A list of commands on one GPU, so many at once (under MPS), until all are done or the minutes are over.

PYTHONPATH=src python3 benchmarks/gpu_queue.py LOGS QUEUE.txt --slots 4 --minutes 27

QUEUE.txt has one command a line (a simple one, without pipes), as `SECONDS command`: it is not begun with fewer seconds
left. The first lines may have precedence on the GPU (--ahead). When the minutes are over each gets a SIGTERM, on which
sparring saves its place, and a SIGKILL if it lingers. A command that ended well leaves LOGS/N.done and is not called
again; what it prints goes to LOGS/N.txt. Called with setsid it survives the shell that began it. queues/ has the lists
of the paper's tables and figures: several rows a line, because only the first run of a process has to compile.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from sparring.runs import AT_ONCE
from sparring.together import one_gpu

GRACE = 20.0  # seconds from SIGTERM to SIGKILL


class Queue:
    """What is left to do; handed out one by one."""

    def __init__(self, lines: list[str], logs: Path, until: float) -> None:
        self.jobs = [(number, *line.split(maxsplit=1)) for number, line in enumerate(lines)]
        self.logs, self.until, self.lock = logs, until, threading.Lock()
        self.began = time.monotonic()

    def next(self) -> tuple[int, str] | None:
        """The first that is not done and has time enough; its number and itself."""
        with self.lock:
            for job in list(self.jobs):
                number, seconds, command = job
                done = (self.logs / f"{number}.done").exists()
                fits = time.monotonic() + float(seconds) < self.until
                if done or fits:
                    self.jobs.remove(job)
                if fits and not done:
                    return number, command
            return None

    def say(self, line: str) -> None:
        """A line for the log, with the time."""
        with (self.logs / "queue.txt").open("a") as file:
            file.write(f"{time.monotonic() - self.began:6.0f} s  {line}\n")


def work(queue: Queue, environment: dict[str, str], ahead: int) -> None:
    """One slot: command after command."""
    while (job := queue.next()) is not None:
        number, command = job
        queue.say(f"begin {number}: {command}")
        # MPS: 0 is normal, 1 below it.
        environ = environment | {"CUDA_MPS_CLIENT_PRIORITY": "0" if number < ahead else "1"}
        with (queue.logs / f"{number}.txt").open("a") as log:
            process = subprocess.Popen(shlex.split(command), env=environ, stdout=log, stderr=subprocess.STDOUT)
            code = finish(process, queue.until)
        if code == 0:
            (queue.logs / f"{number}.done").touch()
        queue.say(f"exit {code} of {number}: {command}")


def finish(process: subprocess.Popen[bytes], until: float) -> int:
    """Wait for its end; past the time ask for it, then make it."""
    for patience, call in ((until - time.monotonic(), process.terminate), (GRACE, process.kill)):
        try:
            return process.wait(timeout=max(0.0, patience))
        except subprocess.TimeoutExpired:
            call()
    return process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--ahead", type=int, default=0, help="so many of the first have precedence")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    lines = [line for line in given.queue.read_text().splitlines() if line.strip()]
    queue = Queue(lines, given.logs, time.monotonic() + 60 * given.minutes)
    alone = given.slots == 1  # then there is nothing to share, and a profiler need not look through MPS
    with nullcontext({}) if alone else one_gpu(torch.device(given.device)) as shared:
        environment = {**os.environ, **shared, "PYTHONUNBUFFERED": "1", AT_ONCE: str(given.slots)}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // given.slots)))
        slots = [threading.Thread(target=work, args=(queue, environment, given.ahead)) for _ in range(given.slots)]
        for slot in slots:
            slot.start()
            time.sleep(1)  # the first line first
        for slot in slots:
            slot.join()
    queue.say("over")


if __name__ == "__main__":
    main()
