"""An attack step on a CPU by each path: the model, folded, in two passes, in bf16, compiled.

    python benchmarks/bench_cpu_paths.py [--compile] [OUT.json]

A step is a forward pass and the gradient of the pixels, on one thread, in CPU time; the paths take turns. Prints the
time of each over that of the model itself. `--compile` adds torch.compile, which takes a minute to start for each
network; that is wall time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.attacks.checks import Model, TwoPasses
from sparring.engine.attack.cpu_passes import CPUPasses
from sparring.engine.attack.folded import fold
from sparring.engine.cpu import bf16_unit
from sparring.models import build
from sparring.training import run_folder

TURNS = 5
NETWORKS = {"tiny_cnn": (1, 8, 64, 40), "small_cnn": (3, 32, 64, 1), "resnet18": (3, 32, 16, 1)}  # steps per turn last


def by_autograd(network: Model, x: Tensor, y: Tensor) -> Tensor:
    point = x.detach().requires_grad_()
    loss = F.cross_entropy(network(point), y, reduction="sum")
    return torch.autograd.grad(loss, point)[0]


def in_two(network: TwoPasses, x: Tensor, y: Tensor) -> Tensor:
    logits, back = network.forward_back(x)
    logits.requires_grad_()
    return back(torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), logits)[0], None)


def paths(name: str, channels: int, side: int, x: Tensor, y: Tensor) -> tuple[dict[str, Callable[[], Tensor]], float]:
    """The steps by path, and how long torch.compile takes to start; infinity where it does not."""
    model = build(name, num_classes=10, channels=channels, size=(side, side)).eval()
    layout = {"memory_format": torch.channels_last}
    folded = fold(model, dtype=torch.float32, fused=False)
    passes = CPUPasses(fold(model, dtype=torch.float32, fused=False))
    steps = {
        "the model": lambda: by_autograd(model, x, y),
        "folded": lambda: by_autograd(folded, x, y),
        "folded, channels_last": lambda: by_autograd(passes, x, y),
        "the same in two passes": lambda: in_two(passes, x, y),
    }
    if bf16_unit():
        half = CPUPasses(fold(model, dtype=torch.bfloat16, fused=False))
        steps["the same in bf16"] = lambda: in_two(half, x, y)
    if "--compile" not in sys.argv:
        return steps, float("inf")
    compiled = torch.compile(fold(model, dtype=torch.float32, fused=False).to(**layout))
    began = time.perf_counter()
    try:
        by_autograd(compiled, x, y)
    except Exception as error:  # no C++ compiler
        print(f"{name}: torch.compile fails: {type(error).__name__}")
        return steps, float("inf")
    steps["folded, torch.compile"] = lambda: by_autograd(compiled, x, y)
    return steps, time.perf_counter() - began


def main(out: Path | None) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, (channels, side, batch, count) in NETWORKS.items():
        torch.manual_seed(0)
        x, y = torch.rand(batch, channels, side, side), torch.randint(10, (batch,))
        steps, start_s = paths(name, channels, side, x, y)
        times: dict[str, list[float]] = {path: [] for path in steps}
        for turn in range(TURNS + 1):  # the first one warms up
            for path, step in steps.items():
                began = time.process_time()
                for _ in range(count):
                    step()
                if turn:
                    times[path].append((time.process_time() - began) / count * 1000)
        medians = {path: statistics.median(all_of) for path, all_of in times.items()}
        found[name] = {"images": batch, "ms": times, "compile_start_s": start_s}
        for path, median in medians.items():
            ratio = median / medians["the model"]
            print(f"{name:9} {batch} images, {path:24} {median:8.2f} ms, {ratio:.2f} of the model's", flush=True)
        if start_s < float("inf"):
            print(f"{name:9} torch.compile starts in {start_s:.0f} s")
    if out is not None:
        where = {**run_folder.environment(torch.device("cpu")), "bf16": bf16_unit() or "none"}
        command = "python benchmarks/bench_cpu_paths.py --compile results/engine/cpu-paths.json"
        out.write_text(json.dumps({"n": TURNS, **where, "command": command, "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != "--compile"]
    main(Path(named[0]) if named else None)
