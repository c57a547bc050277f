"""Several commands at once on one GPU, under NVIDIA's MPS where it is, until they end or the minutes are over.

python3 benchmarks/gpu_at_once.py LOGS --minutes 9 "python3 -m sparring reproduce table1 ..." "python3 ..."

Their kernels share the GPU instead of taking turns. When the minutes are over each gets a SIGINT, on which sparring
saves and stops. What a command prints goes to LOGS/N.txt; its last lines are shown at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

GRACE = 25.0  # seconds to save in


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", type=Path)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--lines", type=int, default=8)
    parser.add_argument("--without-mps", action="store_true")
    given = parser.parse_args()
    began = time.monotonic()
    mps = not given.without_mps and shutil.which("nvidia-cuda-mps-control") is not None
    if mps:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = tempfile.mkdtemp()
        mps = subprocess.run(["nvidia-cuda-mps-control", "-d"]).returncode == 0
    print("with MPS" if mps else "without MPS", flush=True)
    running = []
    for number, command in enumerate(given.commands):
        log = (given.logs / f"{number}.txt").open("w")
        running.append(
            subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=log, stderr=subprocess.STDOUT, text=True)
        )
    for last, given_signal in ((60 * given.minutes, signal.SIGINT), (60 * given.minutes + GRACE, signal.SIGKILL)):
        for process in running:
            try:
                process.wait(timeout=max(0.0, last - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.send_signal(given_signal)
    for number, (process, command) in enumerate(zip(running, given.commands, strict=True)):
        said = (given.logs / f"{number}.txt").read_text(errors="replace").splitlines()
        print(f"--- {command}: exit {process.wait()}, {len(said)} lines", flush=True)
        print("\n".join(line[:200] for line in said[-given.lines :]), flush=True)
    if mps:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
