"""Several commands at once on one GPU (sparring.together), until they end or the minutes are over.

PYTHONPATH=src python3 benchmarks/gpu_at_once.py LOGS --minutes 9 "python3 -m sparring reproduce table1 ..." "..."

When the minutes are over each gets a SIGTERM, on which sparring saves and stops. What a command (a simple one, without
pipes) prints goes to LOGS/N.txt; its last lines are shown at the end.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

import torch

from sparring.errors import RunFailed
from sparring.together import run_together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", type=Path)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--lines", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    began = time.monotonic()
    given.logs.mkdir(parents=True, exist_ok=True)
    logs = [given.logs / f"{number}.txt" for number in range(len(given.commands))]
    # The shell ends well whatever the command does: one that fails is no reason to stop the others.
    shell = "%s > %s 2>&1 & child=$!; trap 'kill -TERM $child; wait $child' TERM; wait $child; echo exit $? >> %s"
    words = [
        shell % (command, shlex.quote(str(log)), shlex.quote(str(log)))
        for command, log in zip(given.commands, logs, strict=True)
    ]
    try:
        run_together(
            [["bash", "-c", line] for line in words],
            device=torch.device(given.device),
            stop=lambda: time.monotonic() - began > 60 * given.minutes,
        )
    except RunFailed as failed:
        print(failed, flush=True)
    for command, log in zip(given.commands, logs, strict=True):
        said = log.read_text(errors="replace").splitlines()
        print(f"--- {command}: {len(said)} lines", flush=True)
        print("\n".join(line[:200] for line in said[-given.lines :]), flush=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
