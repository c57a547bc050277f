"""Cost estimates: proportional to the work, shared runs counted once, rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparring.paper import cost, plan, specs
from sparring.recipes import cifar10
from tests.paper.tiny import TABLE, planned


def test_spelling():
    assert [cost.spell(s) for s in (1, 42, 600, 2 * 3600, 300_000)] == ["5 s", "40 s", "10 min", "2 h", "3 days"]


def test_cost_is_proportional_to_the_work():
    madry, fat = cost.training(cifar10.MADRY), cost.training(cifar10.FAT)
    assert cost.training(cifar10.STANDARD) < fat < madry
    half = replace(cifar10.MADRY, epochs=60)
    assert cost.training(half) - cost._START == pytest.approx((madry - cost._START) / 2)
    assert cost.training(replace(cifar10.MADRY, model="wrn-34-10")) > 4 * madry
    assert cost.training(replace(cifar10.STANDARD, data="cifar10:bird+deer")) < cost.training(cifar10.STANDARD)
    assert madry == pytest.approx(120 * 4.45 + cost._START, rel=0.05)  # measured: 4.45 s per epoch


def test_larger_images_and_an_autoattack_of_the_protocol_cost_more():
    tiny, small = (
        plan(specs.find(name), scale="full", runs_folder=Path(), results_folder=Path(), rows=("madry",), seeds=(0,))[0]
        for name in ("fastat-tiny", "fastat")
    )
    per_epoch = [(cost.training(job.config) - cost._START) / 100 for job in (tiny, small)]
    assert per_epoch[0] == pytest.approx(4 * 99 / 49 * per_epoch[1])
    assert cost.measuring(tiny) == pytest.approx(4 * cost.measuring(small))
    (twice,) = plan(
        specs.find("fig-eps-twice"),
        scale="lite",
        runs_folder=Path(),
        results_folder=Path(),
        rows=("resnet18-cifar10-k10-madry-eps0.03",),
    )
    assert 1000 * cost._AUTOATTACK < cost.measuring(twice) < 1.5 * 1000 * cost._AUTOATTACK


def test_a_shared_run_is_counted_once():
    jobs = plan(specs.find("table2"), scale="lite", runs_folder=Path(), results_folder=Path())
    both = [*jobs, *plan(specs.find("table3"), scale="lite", runs_folder=Path(), results_folder=Path())]
    more = sum(map(cost.measuring, both[len(jobs) :]))
    wide = sum(cost.training(job.config) for job in both[-2:])
    assert cost.seconds(both) == pytest.approx(cost.seconds(jobs) + more + wide)


@pytest.mark.parametrize("item", specs.ITEMS.values(), ids=lambda item: item.name)
def test_every_item_has_a_cost(item):
    jobs = plan(item, scale="lite", runs_folder=Path(), results_folder=Path())
    assert all(cost.seconds([job]) > 0 for job in jobs)


def test_the_cost_of_what_is_left(measured, tmp_path):
    fresh, done = planned(TABLE, tmp_path), planned(TABLE, measured)
    assert cost.left(done) == 0
    trained = planned(TABLE, measured, limit=9)
    assert cost.left(trained) == pytest.approx(sum(map(cost.measuring, trained)))
    assert cost.left(fresh) == pytest.approx(cost.seconds(fresh))  # the list, the plan and the refusal agree
    assert cost.left(fresh, start=0.0) == pytest.approx(cost.seconds(fresh) - 2 * cost._START)


def test_the_cost_on_a_cpu(measured, tmp_path):
    """At about 180 GFLOP/s on two cores 30 epochs of ResNet-18 take days, digits seconds."""
    table = plan(specs.find("table1"), scale="lite", runs_folder=Path(), results_folder=Path(), rows=("madry",))
    assert 3 < cost.on_a_cpu(table) / 86400 < 10
    small = plan(
        specs.find("fig-tau"), scale="lite", runs_folder=Path(), results_folder=Path(), rows=("small_cnn-tau0",)
    )
    assert 3600 < cost.on_a_cpu(small) < cost.on_a_cpu(table)
    assert cost.on_a_cpu(planned(TABLE, tmp_path)) < 3600 and cost.on_a_cpu(planned(TABLE, measured)) == 0


def test_shares_have_about_the_same_work():
    jobs = plan(specs.find("table1"), scale="lite", runs_folder=Path(), results_folder=Path())
    shares = cost.share_out(jobs, 2)
    assert sorted(job.name for share in shares for job in share) == sorted(job.name for job in jobs)
    loads = [cost.left(share) for share in shares]
    assert max(loads) < 1.6 * min(loads)
    assert len(cost.share_out(jobs, 9)) == len(jobs)
    assert cost.share_out([], 2) == []


@pytest.mark.parametrize(("seeds", "whole"), [((0,), "row"), ((0, 1, 2), "seed")])
def test_a_share_can_be_named_by_its_rows_and_seeds(tmp_path, seeds, whole):
    jobs = planned(TABLE, tmp_path, seeds=seeds)
    for share in cost.share_out(jobs, 2):
        rows, its = {job.row.name for job in share}, {job.seed for job in share}
        assert len(share) == len(rows) * len(its)
        assert rows == {"madry", "fat"} if whole == "seed" else its == set(seeds)
