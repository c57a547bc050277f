"""Runs side by side: each has its share, and all start at the same time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sparring import recipes
from sparring.bench import side_by_side
from sparring.bench.training import TimedTraining
from sparring.training.config import to_json

CPU = torch.device("cpu")


def test_share_is_passed_on_and_speeds_are_summed(monkeypatch):
    calls = []

    def run(commands, *, device, share):
        calls.append((len(commands), share))
        folder = Path(commands[0][-2])
        for seed in range(len(commands)):
            (folder / f"done-{seed}").write_text("[10.0, 20.0]")

    monkeypatch.setattr(side_by_side, "run_together", run)
    given = {"device": CPU, "images": 0, "tau": 0, "rounds": 2}
    assert side_by_side.images_per_second(recipes.find("fat-digits").config, 3, share=66, **given) == [30.0, 60.0]
    assert calls == [(3, 66)]


def test_last_batch_is_warmed_up_before_the_barrier(tmp_path, monkeypatch):
    task = {"config": to_json(recipes.find("fat-digits").config), "count": 1, "device": "cpu", "images": 100}
    (tmp_path / "task.json").write_text(json.dumps(task | {"tau": 0, "rounds": 1}))
    seen = []
    monkeypatch.setattr(TimedTraining, "last_batch", lambda training: seen.append((tmp_path / "ready-0").exists()))
    side_by_side._one(tmp_path, 0)
    assert seen == [False] and (tmp_path / "done-0").exists()
