"""How fast several runs are side by side: n processes on one device, each a run with a seed of its own.

`python -m sparring.bench.side_by_side FOLDER SEED` is one of them. It prepares, waits for the others, and trains; speed
counts from there on, epoch by epoch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparring.bench.training import TimedTraining
from sparring.data import load
from sparring.engine import on
from sparring.files.json_text import read_json
from sparring.files.schema import anything, fields, items, number, table, text, whole
from sparring.training.checkpoint import write_text
from sparring.training.config import Config, from_json, to_json
from sparring.training.gpu_sharing import run_together

_TASK = "task.json"
_TASK_OF_A_RUN = fields(
    config=table(anything), count=whole(1), device=text(100), images=whole(1), tau=whole(), rounds=whole(1)
)


def images_per_second(
    config: Config, count: int, *, device: torch.device, images: int, tau: int, rounds: int, share: int
) -> list[float]:
    """Images per second of all runs together while they train, one number for each of `rounds` epochs."""
    with tempfile.TemporaryDirectory() as folder:
        task: dict[str, Any] = {"config": to_json(config), "count": count, "device": str(device), "images": images}
        task |= {"tau": tau, "rounds": rounds}
        (Path(folder) / _TASK).write_text(json.dumps(task))
        words = [sys.executable, "-m", "sparring.bench.side_by_side", folder]
        run_together([[*words, str(seed)] for seed in range(count)], device=device, share=share)
        speeds_of = items(number(0, 1e15), least=rounds, most=rounds)
        found = [read_json(Path(folder) / f"done-{seed}", speeds_of) for seed in range(count)]
    return [float(sum(speeds)) for speeds in zip(*found, strict=True)]


def _one(folder: Path, seed: int) -> None:
    task = read_json(folder / _TASK, _TASK_OF_A_RUN)
    config = replace(from_json(task["config"]), seed=seed)
    device = torch.device(task["device"])
    with on(device):
        training = TimedTraining(config, load(config.data), device, images=task["images"])
        training.epoch(1, task["tau"])  # a warm-up, and so that the model is not fooled at once
        training.last_batch()
        (folder / f"ready-{seed}").touch()
        while len(list(folder.glob("ready-*"))) < task["count"]:
            time.sleep(0.01)
        rows = [training.epoch(2 + epoch, task["tau"]) for epoch in range(task["rounds"])]
        found = [row["images"] / row["seconds"] for row in rows]
        write_text(folder / f"done-{seed}", json.dumps(found))
        while len(list(folder.glob("done-*"))) < task["count"]:  # the slower runs must not be alone at their end
            training.epoch(2 + task["rounds"], task["tau"])


if __name__ == "__main__":
    _one(Path(sys.argv[1]), int(sys.argv[2]))
