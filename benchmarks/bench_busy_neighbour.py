"""Time of training steps with all threads beside a busy process, over their time on an idle machine.

    python benchmarks/bench_busy_neighbour.py [OUT.json]

Each measurement is a process of its own: FAT on digits, with the settings of the command (threads that wait soon go to
sleep, `sparring.cli.cpu_early`) or with those of the library (they spin). The neighbour is one process that computes
without pause, or another such training. Alone and beside them alternate, three times. The bound is 2.5 for the command.
The machine must be idle.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from sparring.training import run_folder

TURNS, STEPS, LIMIT_S, BOUND = 3, 60, 20.0, 2.5
START_S = 4.0  # until a neighbour trains
BESIDE = {"busy": "a busy process", "training": "another training"}
UNSET = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
BUSY = "while True: pass"
# A step that takes a hundred times as long is not waited for: the first steps are timed, at most LIMIT_S of them.
WORK = """
import sys, time
from sparring.cli import cpu_early
if sys.argv[1] == "command":
    cpu_early.start()
import torch
from sparring import FAT, models
from sparring.data import load
torch.manual_seed(0)
data = load("digits")
model = models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
fat, x, y = FAT(eps=0.3, step_size="eps/4", steps=10, tau=2), data.train.x[:64].float() / 255, data.train.y[:64]
def step():
    optimizer.zero_grad()
    fat(model, x, y, generator=torch.Generator().manual_seed(0)).loss.backward()
    optimizer.step()
step()
taken, began = 0, time.perf_counter()
while taken < int(sys.argv[2]) and time.perf_counter() - began < float(sys.argv[3]):
    step()
    taken += 1
print((time.perf_counter() - began) / taken)
"""


def seconds(settings: str, beside: str) -> float:
    """Seconds of a training step, alone or beside a process of one of the kinds in `BESIDE`."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    words = [sys.executable, "-c", WORK, settings, str(STEPS), str(LIMIT_S)]
    neighbour = None
    if beside == "busy":
        neighbour = subprocess.Popen([sys.executable, "-c", BUSY])
    elif beside == "training":
        forever = [sys.executable, "-c", WORK, settings, str(10**9), str(10**9)]
        neighbour = subprocess.Popen(forever, env=environment, stdout=subprocess.DEVNULL)
        time.sleep(START_S)
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()


def main(out: Path | None) -> bool:
    found: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in ("alone", *BESIDE)} for name in ("command", "library")
    }
    for _ in range(TURNS):
        for settings, times in found.items():
            for kind, measured in times.items():
                measured.append(seconds(settings, kind))
    held = True
    for settings, times in found.items():
        alone = statistics.median(times["alone"])
        print(f"{settings:8} {os.cpu_count()} threads: {alone * 1000:.1f} ms a step alone", end="")
        for kind, words in BESIDE.items():
            median = statistics.median(times[kind])
            spread = f"{min(times[kind]) * 1000:.0f}-{max(times[kind]) * 1000:.0f}"
            print(f"; {median * 1000:.0f} beside {words} ({spread}), {median / alone:.1f} times", end="")
            held &= settings == "library" or median / alone <= BOUND
        print()
    print(f"bound {BOUND} for the command: {'holds' if held else 'DOES NOT HOLD'}")
    if out is not None:
        where = run_folder.environment(torch.device("cpu"))
        command = "python benchmarks/bench_busy_neighbour.py results/engine/busy-neighbour-cpu.json"
        out.write_text(json.dumps({"n": TURNS, **where, "command": command, "seconds": found}, indent=1) + "\n")
    return held


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1]) if len(sys.argv) > 1 else None) else 1)
