"""Runs that give one name to different things are not seeds of one run: networks, images, optimisers, weights."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import sparring as library
from sparring.report.identity import settings_of, to_show
from sparring.report.settings import by_seed, common, differing
from sparring.training import run_folder

QUICK = {"epochs": 1, "batch_size": 32, "validation": 8, "device": "cpu", "progress": False, "tensorboard": False}


def images(shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.rand(64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return (drawn + shift).clamp(0, 1), torch.arange(64) % 2


def network(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 2))


def adamw(decay: float = 0.1):
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=decay)


def train(name: str, **changes) -> Path:
    objective = library.Standard()
    given = {"objective": objective, "model": network(), "data": images(), "optimizer": adamw(), **QUICK}
    library.train(None, Path("runs") / name, **given | changes)
    return Path("runs") / name


PAIRS = {
    "network": {"model": network(5)},
    "images": {"data": images(0.5)},
    "weight decay": {"optimizer": adamw(0.2)},
}


@pytest.mark.parametrize("column", PAIRS)
def test_other_things_of_one_name_are_not_averaged(sparring, column):
    one, other = train("a"), train("b", seed=1, **PAIRS[column])
    assert run_folder.open_run(one).config.model == run_folder.open_run(other).config.model == "own:Sequential"
    said = sparring("compare", "runs")
    (heading,) = (line for line in said.out.splitlines() if line.strip().startswith("run "))
    assert said.code == 0 and " ".join(heading.split()).startswith(f"run {column} seed best"), said
    assert "±" not in said.out and "optimizer.betas 0.9, 0.999" in said.out
    assert sparring("report", "runs", "--strips", "0").code == 0
    page = Path("report.html").read_text()
    assert "of seeds 0, 1" not in page and f">{column}<" in page


def test_seeds_are_averaged(sparring):
    train("a-seed0"), train("a-seed1", seed=1)
    said = sparring("compare", "runs")
    assert said.code == 0 and "±" in said.out, said
    assert "images #" not in said.out and "network #" not in said.out and ", momentum " not in said.out
    rows = list(csv.DictReader(io.StringIO(sparring("compare", "runs", "--csv").out)))
    assert rows[0]["images"] == rows[1]["images"] != "" and rows[0]["network"] == rows[1]["network"] != ""
    assert sparring("report", "runs", "--strips", "0").code == 0
    page = Path("report.html").read_text()
    assert "of seeds 0, 1" in page and ">images<" not in page


def test_weights_that_runs_began_from(sparring):
    train("first"), train("second", seed=1)
    begun = [train("third", init="runs/first"), train("fourth", init="runs/first", seed=1)]
    train("first", overwrite=True, seed=2)
    begun.append(train("fifth", init="runs/first", seed=3))
    settings = [settings_of(run_folder.open_run(folder)) for folder in begun]
    assert by_seed(list(zip(settings, "abc", strict=True))) == [["a", "b"], ["c"]]
    assert differing(to_show(settings)) == ["init_weights"]


def test_digests_are_shown_only_where_one_name_has_several():
    a, b = {"data": "folder:a", "images": "#1"}, {"data": "folder:b", "images": "#2"}
    assert to_show([a, b]) == [{"data": "folder:a"}, {"data": "folder:b"}]
    assert to_show([a, b, a | {"images": "#3"}])[1] == b
    assert "images" not in common(to_show([a, a]))


def test_rates_of_groups_are_ratios(sparring):
    def grouped(ratio: float):
        return lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.01 * ratio}], lr=0.01)

    one, other = (settings_of(run_folder.open_run(train(f"r{ratio}", optimizer=grouped(ratio)))) for ratio in (0.5, 1))
    assert one["optimizer.lr_ratios"] == "1.0 | 0.5" and "optimizer.lr_ratios" not in other
    assert "optimizer.lr" not in one and one["optimizer.momentum"] == 0
