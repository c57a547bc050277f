"""The model of several GPUs, and the measurement that it starts from."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparring.bench.scaling import Costs, Network, all_reduce_seconds, in_words, measure, predict
from sparring.data import load
from sparring.recipes.digits import FAT
from sparring.training.distributed import ALONE, joined
from tests.training import group

ROOT = Path(__file__).parents[2]


def test_all_reduce_of_one_machine_is_that_of_a_ring():
    network = Network(inside=100.0, latency=0.5)
    assert all_reduce_seconds(1000, 1, network) == 0
    assert all_reduce_seconds(1000, 2, network) == pytest.approx(1000 / 100 + 0.5)  # 2 (n - 1) / n of the bytes
    assert all_reduce_seconds(1000, 4, network) == pytest.approx(1.5 * 1000 / 100 + 0.5)


def test_between_machines_every_gpu_sends_its_part():
    network = Network(per_machine=2, inside=100.0, between=10.0, latency=0.0, hop=0.25)
    inside = 1000 / 100
    assert all_reduce_seconds(1000, 4, network) == pytest.approx(inside + 500 / 10 + 0.25)
    assert all_reduce_seconds(1000, 8, network) == pytest.approx(inside + 1.5 * 500 / 10 + 2 * 0.25)


def test_efficiency_is_the_share_of_the_time_that_computes():
    costs = Costs(images=10, attack=3.0, update=1.0, exchanged=100)
    network = Network(inside=50.0, latency=0.0)
    found = predict(costs, 2, network)
    assert found["efficiency"] == pytest.approx(4 / 6) and found["images_per_second"] == pytest.approx(20 / 6)
    assert found["batch"] == 20 and found["all_reduce_ms"] == pytest.approx(2000)


def small():
    """One measurement by every process of a group."""
    config = replace(FAT, batch_size=8)
    with joined(torch.device("cpu")) as world:
        return measure(config, load("digits"), torch.device("cpu"), world, kind="plain", repeats=2)


def test_several_processes_measure_together():
    found = group.run(2, small)
    weights = 4 * sum(t.numel() for t in loaded().state_dict().values() if t.is_floating_point())
    for member in found:
        assert (member["processes"], member["backend"], member["n"]) == (2, "gloo", 2)
        assert member["exchanged_bytes"] == weights + 12
        assert set(member["seconds"]) == {"attack", "update_alone", "update_together", "exchange"}
        words = dict(in_words(member))
        assert words["processes"] == "2 (gloo), 8 images each" and "predicted, 512 GPUs" in words


def loaded():
    from sparring.models import build

    return build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))


def test_one_process_exchanges_nothing():
    found = measure(replace(FAT, batch_size=8), load("digits"), torch.device("cpu"), ALONE, kind="plain", repeats=1)
    assert "exchange" not in found["seconds"] and found["processes"] == 1


def test_the_page_has_what_the_script_prints():
    spec = importlib.util.spec_from_file_location("scaling_table", ROOT / "benchmarks" / "scaling_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert "\n".join(script.rows()) in page
    assert "\n".join(script.imagenet()) in page


def test_the_page_has_what_was_measured():
    found = json.loads((ROOT / "results" / "engine" / "scaling-nccl-h200.json").read_text())["scaling"]
    times = [found["seconds"][name] for name in ("attack", "update_alone", "update_together")]
    row = [*(f"{1e3 * seconds:.3f} ms" for seconds in times), f"{1 - found['efficiency']:.1%}".replace("%", " %")]
    assert f"| {' | '.join(row)} |" in (ROOT / "docs" / "scaling.md").read_text()
