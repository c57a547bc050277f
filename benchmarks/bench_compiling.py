"""Seconds to compile ResNet-18's Triton kernels for an H200, one by one and side by side; needs no GPU.

    python benchmarks/bench_compiling.py [OUT.json]

Each variant runs three times in turn, every time in a process of its own with an empty cache. Imports are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

VARIANTS = ("one after the other", "side by side")
REPEATS = 3


def compile_all(variant: str) -> None:
    """Compile in this process; print the seconds and the number of kernels."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from sparring.engine.attack.buckets import bucket_sizes
    from sparring.engine.attack.folded import fold
    from sparring.engine.manual import read_chain
    from sparring.engine.triton import conv, first_layer, pooling
    from sparring.models import build

    h200 = GPUTarget("cuda", 90, 32)
    device = {"get_current_device": lambda: 0, "get_current_stream": lambda device=None: 0}
    driver.set_active(SimpleNamespace(**device, get_current_target=lambda: h200))
    read_chain.convolutions_for = lambda device: (conv, first_layer, pooling)
    if variant == VARIANTS[0]:
        del triton.AsyncCompileMode
    manual = fold(build("resnet18", num_classes=10).eval(), dtype=torch.bfloat16, fused=True).manual
    began = time.perf_counter()
    manual.compile_for(bucket_sizes(128), (3, 32, 32))
    seconds = time.perf_counter() - began
    layers = (conv._conv, first_layer._stem, first_layer._taps, first_layer._to_pixels)
    kernels = sum(len(kernel.device_caches[0][0]) for kernel in layers)
    print(json.dumps({"seconds": seconds, "kernels": kernels, "triton": triton.__version__}))


def main(out: Path | None) -> None:
    import torch

    from sparring.training import run_folder

    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(REPEATS):
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as cache:
                environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
                command = [sys.executable, "-W", "ignore", __file__, "--variant", variant]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found[variant].append(json.loads(done.stdout))
    summary = {
        variant: {"median_s": statistics.median(one["seconds"] for one in each), "each": each}
        for variant, each in found.items()
    }
    ratio = summary[VARIANTS[0]]["median_s"] / summary[VARIANTS[1]]["median_s"]
    result = {**summary, "ratio": ratio, "cores": os.cpu_count(), **run_folder.environment(torch.device("cpu"))}
    print(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--variant"]:
        compile_all(sys.argv[2])
    else:
        main(Path(sys.argv[1]) if sys.argv[1:] else None)
