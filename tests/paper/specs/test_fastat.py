"""The benchmark's item: its protocol in every row, and its published numbers as they were printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparring.paper import specs
from sparring.paper.specs.fastat_published import CIFAR10, TINY_IMAGENET
from sparring.recipes import cifar10
from sparring.schedules import OneCycle

ITEM = specs.find("fastat")
ROWS = {row.name: row for row in ITEM.rows}


@pytest.mark.parametrize("name", [name for name in ROWS if name != "fast"])
def test_rows_follow_the_protocol(name):
    full, lite = ROWS[name].configs["full"], ROWS[name].configs["lite"]
    assert (full.model, full.data, full.epochs, full.batch_size) == ("resnet18", "cifar10", 100, 128)
    assert (full.lr, full.weight_decay, full.momentum, full.ema) == (OneCycle(0.2), 5e-4, 0.9, 0.9995)
    assert (full.augment, full.validation, full.precision) == ("crop-flip", 1000, "bf16")
    assert (full.objective.steps, full.objective.step_size) == (10, 0.007)
    assert str(full.objective.eps) == str(8 / 255)
    # The average covers about the same share of either length.
    assert (1 - full.ema) * full.epochs == pytest.approx((1 - lite.ema) * lite.epochs, rel=0.2)
    assert lite.objective == full.objective


def test_methods_and_their_schedules():
    assert [row.configs["full"].objective.name for row in ITEM.rows] == [
        "madry", "madry", "fat", "trades", "fat-trades", "mart", "fat-mart", "fat",
    ]  # fmt: skip
    fat = ROWS["fat"].configs["full"].objective
    assert [fat.tau.at(epoch, 100) for epoch in (1, 30, 31, 50, 51, 70, 71, 100)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (fat.start, fat.noise) == ("uniform", 0.001)
    assert ROWS["trades"].configs["full"].objective.beta == 6
    assert ROWS["fast"].configs["full"] == cifar10.FAST
    smoothed = {
        row.name: row.configs["full"].label_smoothing for row in ITEM.rows if row.configs["full"].label_smoothing
    }
    assert smoothed == {"madry-smoothing": 0.4}


def test_everything_is_measured_on_the_whole_test_set():
    assert {row.measure for row in ITEM.rows} == {specs.Robustness("fastat", autoattack=10_000)}
    assert list(ITEM.columns.values()) == ["natural", "pgd10", "pgd20", "pgd50", "autoattack"]


def test_the_published_numbers():
    by_name = {method.name: method for method in CIFAR10}
    assert len(CIFAR10) == len(by_name) == 21
    best = max(CIFAR10, key=lambda method: method.autoattack)
    assert (best.name, best.natural, best.pgd20, best.autoattack, best.seconds) == (
        "PGD-AT-WA", 82.36, 54.28, 50.49, 7026.8,
    )  # fmt: skip
    assert (by_name["GAT"].natural, by_name["GAT"].autoattack, by_name["GAT"].memory_gib) == (85.1, 49.15, 1.9)
    for method in CIFAR10:
        assert method.natural > method.pgd10 >= method.pgd20 >= method.pgd50 > method.autoattack


def test_tiny_imagenet_by_the_same_protocol():
    item = specs.find("fastat-tiny")
    assert [row.name for row in item.rows] == ["madry", "fat"] and item.columns == ITEM.columns
    for row in item.rows:
        full, lite = row.configs["full"], row.configs["lite"]
        assert (full.data, full.model, lite.epochs) == ("tiny-imagenet", "preact_resnet18", 30)
        same = {"data": "cifar10", "model": "resnet18"}
        assert replace(full, **same) == ROWS[row.name].configs["full"] and row.measure == ROWS[row.name].measure
        assert (1 - full.ema) * full.epochs == pytest.approx((1 - lite.ema) * lite.epochs, rel=0.25)


def test_the_published_numbers_on_tiny_imagenet():
    by_name = {method.name: method for method in TINY_IMAGENET}
    assert len(TINY_IMAGENET) == len(by_name) == 20 and by_name.keys() < {method.name for method in CIFAR10}
    best, smoothed = max(TINY_IMAGENET, key=lambda method: method.autoattack), by_name["PGD-AT-WA"]
    assert (best.name, best.natural, best.pgd20, best.autoattack) == ("LIET", 44.8, 26.54, 19.88)
    assert (smoothed.natural, smoothed.pgd20, smoothed.autoattack, smoothed.seconds) == (48.07, 26.19, 19.77, 28572.77)
    for method in TINY_IMAGENET:
        assert method.natural > method.pgd10 >= method.pgd20 >= method.pgd50 > method.autoattack
