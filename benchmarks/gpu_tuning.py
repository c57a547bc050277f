"""What does cuDNN's tuning bring to an update, and how much does its choice differ from process to process? One GPU.

PYTHONPATH=src python3 benchmarks/gpu_tuning.py OUT.json MODEL... --ways on off all --processes 3

on: the ten kernels that cuDNN's own guess puts first are tried once each, as the engine has it; off: that guess; all:
every kernel is tried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch


def one(models: list[str], way: str) -> None:
    from gpu_engine_check import BATCH, DEVICE, SHAPE
    from gpu_profile import milliseconds

    from sparring.engine.update import FastUpdate
    from sparring.models import build

    torch.backends.cudnn.benchmark = way != "off"
    torch.backends.cudnn.benchmark_limit = 0 if way == "all" else 10
    x = torch.rand(BATCH, *SHAPE, device=DEVICE)
    y = torch.randint(0, 10, (BATCH,), device=DEVICE)
    found = {}
    for name in models:
        torch.manual_seed(0)
        model = build(name, num_classes=10).to(DEVICE, memory_format=torch.channels_last).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=2e-4)
        how = {"batch": BATCH, "shape": SHAPE, "device": DEVICE, "half": True, "compiled": False}
        loss = lambda m, x, x_adv, y: torch.nn.functional.cross_entropy(m(x_adv), y)  # noqa: E731
        update = FastUpdate(model, optimizer, loss, after=lambda: None, **how)
        torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(lambda update=update: update(x, x, y, 0.0))
        found[name] = {"ms": ms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--ways", nargs="+", default=["on", "off", "all"])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--here", help="this process is one of them")
    given = parser.parse_args()
    if given.here:
        one(given.models, given.here)
        return
    rows = []
    for _ in range(given.processes):
        for way in given.ways:
            command = [sys.executable, __file__, str(given.out), *given.models, "--here", way]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(way, done.stderr[-500:], flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append({"way": way, **found})
            print(way, {name: (round(v["ms"][0], 3), round(v["peak_gib"], 2)) for name, v in found.items()}, flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    about["ms"] = "an update at batch 128, random images: median, lowest, highest of 30 means of 5; a row is a process"
    given.out.write_text(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
