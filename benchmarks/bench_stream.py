"""Time of an epoch of batches streamed from host memory, or from a mapped file, over one of images on the device.

    python benchmarks/bench_stream.py [OUT.json]

Batches of 128 images of 32x32, cropped and flipped, without any training; on the CPU and, where there is one, on a GPU.
All three run in turn in one process, five times. Compare the ratios, not the seconds. Batches that nothing waits for
are the worst case: a training step hides the reading of the next ones.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from sparring.data import Rows, Split, Training, place, training_batches
from sparring.data.npz import load_npz
from sparring.training import run_folder

IMAGES, BATCH, TURNS = 20_000, 128, 5


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
    y = np.arange(IMAGES) % 10
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npz"
        np.savez(path, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
        found = {device.type: compare(path, device) for device in devices}
    for kind, ratios in found.items():
        for name, values in ratios.items():
            median = statistics.median(values)
            print(f"{kind}: {name} takes {median:.2f} of the time of images on the device", end=" ")
            print(f"({min(values):.2f}-{max(values):.2f}, n={TURNS}, {IMAGES} images)")
    if len(sys.argv) > 1:
        facts = {"ratios": found, "n": TURNS, "images": IMAGES, **run_folder.environment(devices[-1])}
        facts["command"] = "python benchmarks/bench_stream.py"
        Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n")


def compare(path: Path, device: torch.device) -> dict[str, list[float]]:
    """The ratios of every turn, by where the images are."""
    held, mapped = load_npz(path).train, load_npz(path, room=0).train
    assert isinstance(held, Split) and isinstance(mapped, Split) and mapped.mapped
    places: dict[str, Training] = {
        "device": place(held, device),
        "host memory": place(held, device, room=0),
        "a mapped file": place(mapped, device, room=0),
    }
    assert isinstance(places["host memory"], Rows) and isinstance(places["a mapped file"], Rows)
    times: dict[str, list[float]] = {name: [] for name in places}
    for turn in range(TURNS + 1):
        for name, images in places.items():
            seconds = epoch(images, turn, device)
            if turn:  # the first warms up
                times[name].append(seconds)
    return {
        name: [one / other for one, other in zip(times[name], times["device"], strict=True)]
        for name in places
        if name != "device"
    }


def epoch(images: Training, number: int, device: torch.device) -> float:
    """Seconds of one epoch of batches; every batch is summed up, so that it has to arrive."""
    began = time.perf_counter()
    total = torch.zeros((), device=device)
    for batch in training_batches(images, BATCH, seed=0, epoch=number, augment="crop-flip"):
        total += batch.x.sum()
    total.item()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
