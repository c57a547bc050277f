"""Do runs side by side gain when each has a part of the GPU to itself? Images a second, all runs together.

PYTHONPATH=src python3 benchmarks/gpu_shares.py OUT.json --model small_cnn --pairs 1:100 8:100 8:25 8:13

A pair is RUNS:SHARE, the share of the multiprocessors that a run may use in per cent (MPS's active thread percentage).
At 100 their kernels compete for all of them, and a kernel of few images waits behind those of many. What came of it is
together.fair_share.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from sparring import recipes, runs
from sparring.bench.company import images_per_second
from sparring.schedules import constant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="fat-cifar10-resnet18")
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--pairs", nargs="+", default=["1:100", "8:100", "8:25", "8:13"])
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--tau", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    device = torch.device(given.device)
    config = replace(recipes.find(given.recipe).config, model=given.model, data=given.data, lr=constant(0.02))
    found = {**runs.environment(device), "given": vars(given) | {"out": given.out.name}, "pairs": []}
    for pair in given.pairs:
        count, share = map(int, pair.split(":"))
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        how = {"images": given.images, "tau": given.tau, "rounds": given.rounds, "share": share}
        each = images_per_second(config, count, device=device, **how)
        speed = statistics.median(each)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cores = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wall
        found["pairs"].append({"runs": count, "share": share, "images_per_second": speed, "each": each, "cores": cores})
        given.out.write_text(json.dumps(found, indent=1))
        ratio = speed / found["pairs"][0]["images_per_second"]
        told = f"{speed:10,.0f} images/s  {ratio:.2f}x, {cores:.1f} cores in {wall:.0f} s"
        print(f"{count:2} runs, {share:3} % each: {told}", flush=True)


if __name__ == "__main__":
    main()
