"""Time of training steps with all threads beside a busy process, over their time on an idle machine.

    python benchmarks/bench_busy_neighbour.py [OUT.json]

Each measurement is a process of its own: FAT on digits, with the settings of the command (threads that wait go to
sleep, `sparring.cli.cpu_early`) or with those of the library (they spin). The neighbour is one process that computes
without pause. Alone and beside it alternate, three times. The bound is 2.5 for the command. The machine must be idle.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from sparring.training import run_folder

TURNS, STEPS, LIMIT_S, BOUND = 3, 60, 60.0, 2.5
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


def seconds(settings: str, *, busy: bool) -> float:
    """Seconds of a training step."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    neighbour = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
    try:
        words = [sys.executable, "-c", WORK, settings, str(STEPS), str(LIMIT_S)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()


def main(out: Path | None) -> bool:
    found: dict[str, dict[str, list[float]]] = {name: {"alone": [], "beside": []} for name in ("command", "library")}
    for _ in range(TURNS):
        for settings, times in found.items():
            times["alone"].append(seconds(settings, busy=False))
            times["beside"].append(seconds(settings, busy=True))
    ratios = {}
    for settings, times in found.items():
        alone, beside = (statistics.median(times[which]) for which in ("alone", "beside"))
        ratios[settings] = beside / alone
        spread = f"{min(times['beside']) * 1000:.0f}-{max(times['beside']) * 1000:.0f}"
        print(
            f"{settings:8} {os.cpu_count()} threads: {alone * 1000:6.1f} ms a step alone, {beside * 1000:7.1f} beside "
            f"a busy process ({spread}): {beside / alone:.1f} times"
        )
    held = ratios["command"] <= BOUND
    print(f"bound {BOUND} for the command: {'holds' if held else 'DOES NOT HOLD'}")
    if out is not None:
        where = run_folder.environment(torch.device("cpu"))
        command = "python benchmarks/bench_busy_neighbour.py results/engine/busy-neighbour-cpu.json"
        out.write_text(json.dumps({"n": TURNS, **where, "command": command, "seconds": found}, indent=1) + "\n")
    return held


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1]) if len(sys.argv) > 1 else None) else 1)
