"""The paper's items: complete, buildable, and as in the paper."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from sparring import models
from sparring.errors import UserError
from sparring.evaluation.protocols import PROTOCOLS
from sparring.models.features import layers
from sparring.paper import specs
from sparring.paper.specs import Mixture, Robustness
from sparring.paper.specs.item import published
from sparring.schedules import OneCycle, constant
from sparring.training import config

ITEMS = list(specs.ITEMS.values())
CONFIGS = {
    json.dumps(config.to_json(found)): found
    for item in ITEMS
    for row in item.rows
    for found in row.configs.values()
    if found is not None
}


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_items_are_complete(item):
    names = [row.name for row in item.rows]
    assert len(set(names)) == len(names) and all("/" not in name and " " not in name for name in names)
    assert item.claim and item.title and item.where and item.lite
    assert any("lite" in row.configs for row in item.rows)
    for row in item.rows:
        assert row.configs and set(row.configs) <= {"lite", "full"}
        assert set(row.paper) <= set(item.columns)
        assert item.kind not in ("table", "benchmark") or len({one.label for one in item.rows}) == len(names)
        if isinstance(row.measure, Robustness):
            offered = {attack.name for attack in PROTOCOLS[row.measure.protocol].attacks}
            assert set(item.columns.values()) - {"natural", "autoattack"} <= offered
            anyway = "autoattack" in offered  # by the protocol itself
            assert ("autoattack" in item.columns.values()) == (row.measure.autoattack >= 1000 or anyway)
        if {"lite", "full"} <= row.configs.keys() and row.configs["full"] is not None:
            assert row.configs["lite"].epochs <= row.configs["full"].epochs
            assert row.configs["lite"].objective.name == row.configs["full"].objective.name


def test_configurations_round_trip():
    for text, found in CONFIGS.items():
        assert config.from_json(json.loads(text)) == found


@pytest.mark.parametrize("name", sorted({found.model for found in CONFIGS.values()}))
def test_networks_build(name):
    with torch.device("meta"):
        models.build(name, num_classes=10, channels=3, size=(32, 32))


def test_tiny_imagenet_fits_its_network():
    for row in specs.find("fastat-tiny").rows:
        with torch.device("meta"):
            network = models.build(row.configs["full"].model, num_classes=200, channels=3, size=(64, 64))
            assert network.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, 200)


def test_the_layers_of_the_mixture_exist():
    for row in specs.find("fig-mixture").rows:
        assert isinstance(row.measure, Mixture)
        with torch.device("meta"):
            count = len(layers(models.build(row.configs["full"].model, num_classes=10)))
        assert max(row.measure.layers) <= count


def changes(schedule, epochs):
    """The epochs at which a schedule changes its value."""
    return [e for e in range(2, epochs + 1) if schedule.at(e, epochs) != schedule.at(e - 1, epochs)]


# Item, row, network, epochs, changes of the learning rate, changes of tau.
FULL = [
    ("table1", "fat-8", "wrn-32-10", 120, [60, 90, 110], [51, 91]),
    ("table2", "fat-trades-8", "wrn-34-10", 85, [75], [31, 51, 71]),
    ("table3", "fat-trades-16-larger", "wrn-58-10", 85, [75], [31, 51, 71]),
    ("table4", "fat-mart-8", "wrn-34-10", 90, [60, 90], [21, 41, 61, 81]),
    ("fig-tau", "small_cnn-tau3", "small_cnn", 80, [60], []),
    ("fig-bps", "resnet18-fat-trades-tau0", "resnet18", 100, [60, 90], []),
    ("fig-eps", "resnet18-svhn-k10-tau1-eps0.02", "resnet18", 80, [60], []),
    ("fig-no-projection", "small_cnn-tau0-alpha0.003", "small_cnn", 80, [60], []),
]


@pytest.mark.parametrize(("item", "row", "model", "epochs", "lr", "tau"), FULL)
def test_full_scale_is_the_papers_setting(item, row, model, epochs, lr, tau):
    found = {one.name: one for one in specs.find(item).rows}[row].configs["full"]
    assert (found.model, found.epochs) == (model, epochs)
    assert (changes(found.lr, epochs), changes(getattr(found.objective, "tau", constant(0)), epochs)) == (lr, tau)
    assert (found.batch_size, found.momentum, found.weight_decay, found.augment) == (128, 0.9, 2e-4, "crop-flip")


def row_of(item, name):
    return {row.name: row for row in specs.find(item).rows}[name]


def test_radii_and_steps():
    wide = row_of("table1", "fat-16").configs["full"].objective
    assert str(wide.eps) == str(16 / 255) and wide.step_size == 0.007 and wide.steps == 10
    far = row_of("fig-eps", "small_cnn-cifar10-trades-k20-trades-eps0.15").configs["full"]
    assert (
        far.objective.name == "trades" and far.objective.steps == 20 and far.objective.step_size == pytest.approx(0.015)
    )
    free = row_of("fig-no-projection", "resnet18-tau3-alpha0.011").configs["lite"].objective
    assert not free.project and free.start is None and free.steps * free.step_size == pytest.approx(0.11)


@pytest.mark.parametrize(
    ("item", "prefix", "methods", "points"),
    [
        ("fig-no-projection", "resnet18-", ("tau0", "tau1", "tau3", "madry"), (0.003, 0.007, 0.011, 0.015)),
        ("fig-eps", "resnet18-cifar10-k10-", ("tau0", "tau1", "tau3", "madry"), (0.03, 0.06, 0.09, 0.12, 0.15)),
        ("fig-eps", "resnet18-cifar10-k20-", ("tau0", "tau1", "tau3", "madry"), (0.03, 0.09, 0.15)),
        ("fig-eps", "resnet18-cifar10-trades-k10-", ("tau0", "tau1", "tau3", "trades"), (0.03, 0.06, 0.09, 0.12, 0.15)),
        ("fig-eps", "resnet18-svhn-k10-", ("tau0", "tau1", "tau3", "madry"), (0.01, 0.03, 0.06)),
    ],
)
def test_the_lite_scale_of_a_line_figure_is_a_whole_grid(item, prefix, methods, points):
    letter = "alpha" if item == "fig-no-projection" else "eps"
    wanted = {f"{prefix}{method}-{letter}{x:g}": x for method in methods for x in points}
    rows = [row for row in specs.find(item).rows if row.name.startswith(prefix) and "lite" in row.configs]
    assert {row.name: row.x for row in rows} == wanted


def test_step_sizes_at_full_scale_are_those_of_the_recipes():
    full = [row for row in specs.find("fig-no-projection").rows if "full" in row.configs]
    assert sorted({row.x for row in full}) == [0.003, 0.006, 0.009, 0.012, 0.015]


def test_runs_that_figures_share():
    tau, bps = specs.find("fig-tau"), specs.find("fig-bps")
    shared = [
        (a.name, b.name)
        for a, b in itertools.product(tau.rows, bps.rows)
        if b.configs["lite"] in (a.configs.get("lite"), a.configs["full"])
    ]
    assert len(shared) == 10  # Small CNN (80 epochs) and ResNet-18 (20), tau 0 to 3 and 10
    once, twice = (
        {row.name: row.configs for row in specs.find(name).rows if row.name.startswith("resnet18-cifar10-k10-")}
        for name in ("fig-eps", "fig-eps-twice")
    )
    assert once == twice and len(twice) == 36
    table2, table3 = ({row.name: row.configs for row in specs.find(name).rows} for name in ("table2", "table3"))
    assert table2["fat-trades-8"] == table3["fat-trades-8"]


def test_published_numbers_are_parsed_as_printed():
    columns = {"Natural": "natural", "FGSM": "fgsm", "PGD-20": "pgd20"}
    assert published("89.34±0.221 - 46.1", columns) == {"Natural": (89.34, 0.221), "PGD-20": (46.1, None)}
    with pytest.raises(ValueError):
        published("89.34 46.1", columns)
    assert row_of("table1", "fat-16").paper["PGD-100"] == (49.56, 0.255)
    assert row_of("table2", "trades").paper["C&W"] == (54.47, None)
    assert row_of("table3", "fat-trades-8-larger").paper["FGSM"] == (68.7, None)
    assert row_of("table4", "fat-mart-16").paper["Natural"] == (84.39, 0.390)


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("figure1", "fig-motivation"),
        ("fig-2", "fig-loss"),
        ("Figure 3", "fig-mixture"),
        ("fig4", "fig-tau"),
        ("fig-5", "fig-bps"),
        ("figure-6", "fig-eps"),
        ("fig7", "fig-eps"),
    ],
)
def test_a_figure_is_found_by_its_number(name, item):
    assert specs.find(name).name == item


def test_an_unknown_item_is_a_user_error():
    with pytest.raises(UserError, match="unknown item 'fig-9'"):
        specs.find("fig-9")
    with pytest.raises(UserError, match=r"unknown item 'table5'. Did you mean 'table"):
        specs.find("table5")


def test_lite_changes_a_tables_epochs_batch_and_optimiser_only():
    full, lite = row_of("table1", "fat-16").configs["full"], row_of("table1", "fat-16").configs["lite"]
    assert (lite.epochs, lite.batch_size, lite.model) == (30, 256, "resnet18")
    assert (lite.lr, lite.weight_decay) == (OneCycle(0.3), 5e-4)
    kept = {name: getattr(full, name) for name in ("epochs", "batch_size", "lr", "weight_decay", "model")}
    assert replace(lite, **kept) == full


def test_lite_keeps_the_papers_learning_rate_steps_for_larger_radii():
    name = "resnet18-cifar10-k10-madry-eps0.15"
    full, lite = row_of("fig-eps", name).configs["full"], row_of("fig-eps", name).configs["lite"]
    assert (lite.epochs, lite.batch_size) == (20, 256)
    assert lite.lr.values() == tuple(2 * value for value in full.lr.values())
    assert [start for start, _ in lite.lr.pieces] == [start for start, _ in full.lr.pieces]
    assert replace(lite, epochs=full.epochs, batch_size=full.batch_size, lr=full.lr) == full
