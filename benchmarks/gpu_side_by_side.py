"""How much is gained by several runs on one GPU, each a process: with and without NVIDIA's MPS.

PYTHONPATH=src:site SPARRING_DATA=DATA python3 benchmarks/gpu_side_by_side.py OUT.json [--tau 0] [--counts 1 2 4]

Without MPS the processes take turns on the GPU; with it their kernels run at the same time. Threads of one process are
measured by `sparring bench --only together`. Images a second from the moment when all are ready, over two epochs each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from sparring import runs
from sparring.bench import Bench, Options
from sparring.data import load
from sparring.recipes import find
from sparring.schedules import constant

EPOCHS = 2


def one(given: argparse.Namespace) -> None:
    """A run: get ready, wait for the others, train."""
    config = replace(find("fat-cifar10-resnet18").config, seed=given.one, model=given.model, lr=constant(0.05))
    bench = Bench(config, load("cifar10"), torch.device(given.device), Options(images=given.images, repeats=1))
    bench.steps()
    bench._epoch(config, 1, given.tau)
    (given.folder / f"ready-{given.one}").touch()
    while len(list(given.folder.glob("ready-*"))) < given.counts[0]:
        time.sleep(0.01)
    began = time.time()
    rows = [bench._epoch(config, 2 + epoch, given.tau) for epoch in range(EPOCHS)]
    images = sum(row["images"] for row in rows)
    found = {"began": began, "ended": time.time(), "images": images, "backprops": rows[-1]["backprops"]}
    (given.folder / f"done-{given.one}.json").write_text(json.dumps(found))


def several(count: int, given: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "-", "--tau", str(given.tau), "--model", given.model]
        command += ["--counts", str(count), "--folder", folder]
        command += ["--device", given.device, "--images", str(given.images)]
        processes = [subprocess.Popen([*command, "--one", str(seed)]) for seed in range(count)]
        for process in processes:
            if process.wait(timeout=150):
                raise SystemExit(f"a run failed: {process.returncode}")
        rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("done-*.json"))]
    # While all of them train: from the last that began to the first that ended.
    begin, end = max(row["began"] for row in rows), min(row["ended"] for row in rows)
    speed = sum(row["images"] / (row["ended"] - row["began"]) for row in rows)
    return {"runs": count, "images_per_second": speed, "all_at_once_s": end - begin, "each": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tau", type=int, default=0)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--without", action="store_true", help="also without MPS")
    parser.add_argument("--one", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.one is not None:
        one(given)
        return
    found = {"tau": given.tau, "model": given.model, **runs.environment(torch.device(given.device)), "rows": []}
    for mps in (False, True) if given.without else (True,):
        if mps and given.device == "cuda":
            pipe = tempfile.mkdtemp()
            os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = pipe
            started = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, text=True)
            print("mps:", started.returncode, started.stdout, started.stderr, flush=True)
            if started.returncode:
                break
        first = 0.0
        for count in given.counts:
            try:
                row = {"mps": mps} | several(count, given)
            except (SystemExit, subprocess.TimeoutExpired) as error:
                print(f"mps {mps}, {count} at once: {error}", flush=True)
                continue
            first = first or row["images_per_second"]
            row["over_one"] = row["images_per_second"] / first
            found["rows"].append(row)
            print(
                f"mps {mps}, {count} at once: {row['images_per_second']:,.0f} images/s, {row['over_one']:.2f}x, "
                f"{row['each'][0]['backprops']:.2f} BPs, all at once for {row['all_at_once_s']:.1f} s",
                flush=True,
            )
            given.out.write_text(json.dumps(found, indent=1))
        if mps and given.device == "cuda":
            subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True)


if __name__ == "__main__":
    main()
