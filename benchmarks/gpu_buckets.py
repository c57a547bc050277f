"""How much finer should buckets be? A step at every fourth number of images. One GPU, random images.

PYTHONPATH=src python3 benchmarks/gpu_buckets.py OUT.json [MODEL ...]
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from gpu_engine_check import BATCH, DEVICE, SHAPE, made
from gpu_profile import milliseconds

from sparring.engine.active import ActiveSet
from sparring.engine.graphs import Captured

SIZES = {"wrn-34-10": tuple(range(32, 60, 4))}
ALL = (*range(4, 68, 4), *range(72, BATCH + 1, 8))


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:] or ["small_cnn", "resnet18"]
    torch.backends.cudnn.benchmark = True
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    found["ms"] = "median, lowest and highest of 12 means of 5"
    for name in names:
        _, engine, _ = made(name, half=True)
        network, pool, kept, rows = engine.walk.network, torch.cuda.graph_pool_handle(), [], []
        active = ActiveSet(
            BATCH, SHAPE, 10, steps=10, inner="ce", noise=True, project=True, device=DEVICE, dtype=torch.float32
        )
        x, y = torch.rand(BATCH, *SHAPE, device=DEVICE), torch.randint(0, 10, (BATCH,), device=DEVICE)
        for size in reversed(SIZES.get(name, ALL)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            kept.append(Captured(partial(active.step, network, size), pool))
            took = time.perf_counter() - began
            active.begin(x, y, x, tau=10, eps=0.03, step_size=0.001, noise=0.001)
            rows.append({"size": size, "ms": milliseconds(kept[-1], 12), "capture_s": took})
            print(f"{name} at {size}: {rows[-1]['ms'][0]:.4f} ms, captured in {took:.2f} s", flush=True)
        found[name] = rows
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
