"""Where does the time of a captured step go? Kernel by kernel, one GPU, random images. A tool for docs/performance.md.

PYTHONPATH=src python3 benchmarks/gpu_profile.py OUT_FOLDER [MODEL] [compiler | autograd]

With `compiler` the update's batch-norms are left to torch's compiler, not to norm.py; with `autograd` the gradients of
weights are left to autograd, not found aside.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from gpu_engine_check import BATCH, DEVICE, SHAPE, made
from torch.profiler import ProfilerActivity, profile

from sparring.engine import fusing, update


def milliseconds(work, repeats=30):
    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / 5)
    return statistics.median(times), min(times), max(times)


def table(name, work, out, repeats=5):
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    rows = defaultdict(lambda: [0, 0.0])
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            rows[event.name][0] += 1
            rows[event.name][1] += event.device_time
    total = sum(time for _, time in rows.values()) / repeats
    count = sum(count for count, _ in rows.values()) / repeats
    print(f"{name}: {count:.0f} kernels, {total:.0f} us in kernels")
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {BATCH}, random images"
    lines = [f"{name}: {count:.0f} kernels, {total:.0f} us, mean of {repeats}. {where}. {' '.join(sys.argv)}"]
    for kernel, (times, spent) in sorted(rows.items(), key=lambda item: -item[1][1]):
        lines.append(f"{spent / repeats:9.1f} us {times / repeats:5.1f} x  {kernel[:110]}")
    (out / f"profile-{name}.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    out, name = Path(sys.argv[1]), (sys.argv[2:] or ["resnet18"])[0]
    out.mkdir(parents=True, exist_ok=True)
    if sys.argv[3:] == ["compiler"]:
        update.norms_for = lambda device: None
    if sys.argv[3:] == ["autograd"]:
        fusing._set_aside = lambda graph, node, aside: None
    torch.backends.cudnn.benchmark = True
    model, engine, began = made(name, half=True)
    x = torch.rand(BATCH, *SHAPE, device=DEVICE)
    y = torch.randint(0, 10, (BATCH,), device=DEVICE)
    given = {"eps": 8 / 255, "step_size": 0.007, "steps": 10, "tau": 10, "loss": "ce", "start": "uniform"}
    given |= {"noise": 0.001, "project": True}
    engine.walk(model, x, y, generator=torch.Generator(DEVICE), **given)
    torch.cuda.synchronize()
    print(engine.line, "fused" if engine.update.working.fused is not None else "compiled", flush=True)
    print(f"{name}: attack ready after {time.perf_counter() - began:.1f} s", flush=True)
    engine.update(x, x, y, 0.0)
    torch.cuda.synchronize()
    print(f"{name}: update ready after {time.perf_counter() - began:.1f} s", flush=True)
    (bench,) = engine.walk.made.values()
    for size, graph in sorted(bench.steps.items()):
        bench.active.begin(x, y, x, tau=99, eps=8 / 255, step_size=0.001)
        ms = milliseconds(graph)
        print(f"{name} step at {size}: {ms[0]:.3f} ms ({ms[1]:.3f}-{ms[2]:.3f})", flush=True)
        if size in (16, BATCH):
            table(f"{name}-step-{size}", graph, out)
    ms = milliseconds(lambda: engine.update(x, x, y, 0.0))
    print(f"{name} update: {ms[0]:.3f} ms ({ms[1]:.3f}-{ms[2]:.3f})", flush=True)
    table(f"{name}-update", lambda: engine.update(x, x, y, 0.0), out)
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
