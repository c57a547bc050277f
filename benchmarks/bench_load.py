"""Time and peak memory under load: many images, a large file, many runs, many epochs, a long training.

    python benchmarks/bench_load.py [OUT.json] [--only images npz runs epochs leak] [--scratch FOLDER]
        [--images 100000] [--gib 6] [--runs 2000] [--epochs 10000] [--trained 2000]

Each measurement is a process of its own with one thread: its seconds, the seconds that it computed (others may share
the machine), and its peak of resident memory, beside that of a process that only imports Sparring. Inputs are made in
the scratch folder (4 kB per image, 0.6 MB per run) and removed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import sparring
from sparring.cli import main as main_of_command
from sparring.data import Split, load, place, training_batches
from sparring.data.npz import load_npz
from sparring.training import run_folder

PARTS = ("images", "npz", "runs", "epochs", "leak")
BATCHES = 1_000  # of 128 images, drawn from the large file
SIDE, CLASSES = 32, 10
Found = dict[str, Any]


def train_small(out: Path, **changes: Any) -> None:
    """A run on 96 digits: two updates an epoch."""
    digits = load("digits").train
    x, y = digits.x[:96], digits.y[:96]
    settings = {"model": "tiny_cnn", "validation": 16, "batch_size": 40, "progress": False, "device": "cpu", **changes}
    attack = sparring.FAT(eps=0.1, step_size=0.02, steps=3)
    sparring.train(objective=attack, data=((x, y), (x[:8], y[:8])), out=out, **settings)


def memory(entry: str) -> int:
    """Bytes of this process, by their name in /proc: VmHWM is the peak, VmRSS the present, RssAnon without files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(entry)


# --- what a measured process does -------------------------------------------------------------------------------------


def read_images(folder: Path) -> Found:
    data = load(f"folder:{folder}")
    return {"images": len(data.train.y) + len(data.test.y)}


def read_npz(path: Path) -> Found:
    """The file as on a machine whose memory is too small for it: mapped."""
    began = time.perf_counter()
    data = load_npz(path, room=0)
    opened = time.perf_counter() - began
    assert isinstance(data.train, Split) and data.train.mapped
    images = place(data.train, torch.device("cpu"), room=0)
    began, taken = time.process_time(), 0
    for batch in training_batches(images, 128, seed=0, epoch=1, augment="none"):
        taken += len(batch.x)
        if taken >= BATCHES * 128:
            break
    spent = time.process_time() - began
    return {
        "open_s": round(opened, 2),
        "images": taken,
        "images_per_cpu_s": round(taken / spent),
        "without_file_mib": memory("RssAnon") >> 20,
    }


def read_epochs(folder: Path) -> Found:
    run = run_folder.open_run(folder)
    return {"epochs": len(run.metrics()), "whole": len(run_folder.whole_history(folder))}


class Resident:
    """Notes the memory of the process after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.at = sorted({min(100, epochs), epochs // 4, epochs // 2, epochs})
        self.found: dict[int, int] = {}

    def begin(self, config: Any, *, steps: int, epoch: int, engine: str) -> None:
        pass

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        pass

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        if record["epoch"] in self.at:
            self.found[record["epoch"]] = memory("VmRSS") >> 10

    def end(self) -> None:
        pass


def leak(folder: Path) -> Found:
    epochs = int(folder.name)
    tracker = Resident(epochs)
    train_small(folder / "run", epochs=epochs, tracker=tracker)
    return {"resident_kib": tracker.found}


def report(folder: Path) -> Found:
    """A page of the runs in a folder, and its size."""
    page = folder.parent / "page.html"
    assert main_of_command(["report", str(folder), "--out", str(page), "--strips", "0"]) == 0
    return {"page_mib": round(page.stat().st_size / 2**20, 2)}


def compare(folder: Path) -> Found:
    assert main_of_command(["compare", str(folder)]) == 0
    return {}


MEASURED: dict[str, Callable[[Path], Found]] = {
    "nothing": lambda _: {},
    "images": read_images,
    "npz": read_npz,
    "epochs": read_epochs,
    "leak": leak,
    "report": report,
    "compare": compare,
}


# --- how it is measured -----------------------------------------------------------------------------------------------


def measured(part: str, path: Path, folder: Path) -> Found:
    """What a process of its own found, with its seconds and its peak of memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SPARRING_DATA": str(folder / "cache")}
    words = [sys.executable, str(Path(__file__).resolve()), "--measure", part, str(path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def images(options: argparse.Namespace, folder: Path) -> Found:
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / "images" / str(label)).mkdir(parents=True)
    for number in range(options.images):
        packed = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(packed, "BMP")
        (folder / "images" / str(number % CLASSES) / f"{number}.bmp").write_bytes(packed.getvalue())
    return {"n": options.images, "pixels_mib": options.images * SIDE * SIDE * 3 >> 20} | measured(
        "images", folder / "images", folder
    )


def npz(options: argparse.Namespace, folder: Path) -> Found:
    count = int(options.gib * 2**30) // (SIDE * SIDE * 3)
    path, block = folder / "large.npz", 10_000
    pixels = np.random.default_rng(0).integers(0, 256, (block, SIDE, SIDE, 3), dtype=np.uint8).tobytes()
    row = SIDE * SIDE * 3
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, length in (("x_train", count), ("x_test", block)):
            head = io.BytesIO()
            shape = {"descr": "|u1", "fortran_order": False, "shape": (length, SIDE, SIDE, 3)}
            np.lib.format.write_array_header_1_0(head, shape)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(head.getvalue())
                for first in range(0, length, block):
                    member.write(pixels[: min(block, length - first) * row])
            labels = io.BytesIO()
            np.save(labels, np.arange(length) % CLASSES)
            archive.writestr(f"y_{name[2:]}.npy", labels.getvalue())
    return {"gib": options.gib, "images_in_file": count} | measured("npz", path, folder)


def runs(options: argparse.Namespace, folder: Path) -> Found:
    """Runs of one epoch in groups of ten seeds that differ in their weight decay."""
    for number in range(options.runs):
        seed, group = number % 10, number // 10
        train_small(folder / "runs" / f"run{number}", epochs=1, seed=seed, weight_decay=1e-4 * (group + 1))
    return {"n": options.runs} | {part: measured(part, folder / "runs", folder) for part in ("report", "compare")}


def epochs(options: argparse.Namespace, folder: Path) -> Found:
    train_small(folder / "long", epochs=1)
    run = run_folder.open_run(folder / "long")
    record = run.metrics()[0]
    for number in range(2, options.epochs + 1):
        run.record({**record, "epoch": number})
    parts = ("epochs", "report", "compare")
    return {"n": options.epochs} | {part: measured(part, folder / "long", folder) for part in parts}


def long_training(options: argparse.Namespace, folder: Path) -> Found:
    place = folder / str(options.trained)
    place.mkdir()
    return {"n": options.trained} | measured("leak", place, folder)


MADE = {"images": images, "npz": npz, "runs": runs, "epochs": epochs, "leak": long_training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--gib", type=float, default=6)
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--trained", type=int, default=2_000)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        part, path = options.measure
        began, worked = time.perf_counter(), time.process_time()
        found = MEASURED[part](Path(path))
        spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
        rounded = {name: round(value, 2) for name, value in spent.items()}
        print("\n" + json.dumps({**rounded, "peak_mib": memory("VmHWM") >> 20, **found}))
        return
    needed = int(options.gib * 1.1 * 2**30) if "npz" in options.only else 2**30
    if shutil.disk_usage(options.scratch or tempfile.gettempdir()).free < needed + 2**31:
        raise SystemExit(
            f"{(needed >> 30) + 2} GiB of disk are needed. Choose a folder with --scratch, or a smaller --gib."
        )
    found: Found = {}
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        found["imports"] = measured("nothing", Path(scratch), Path(scratch))
        print(f"imports: {json.dumps(found['imports'])}", flush=True)
        for part in options.only:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                found[part] = MADE[part](options, Path(folder))
            print(f"{part}: {json.dumps(found[part])}", flush=True)
    if options.out:
        facts = {**found, **run_folder.environment(torch.device("cpu"))}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
