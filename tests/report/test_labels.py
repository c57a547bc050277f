"""Names of runs: made of what differs, and unique."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparring.paper.plan import key
from sparring.report.labels import labels, resumed, shorten
from sparring.schedules import constant
from sparring.training.config import Config, with_objective

PLAIN = Config(epochs=5)


def stronger(config, **changes):
    return with_objective(config, **changes)


def called(*configs):
    """The labels of runs that `sparring reproduce` made."""
    return list(labels({Path("runs") / key(config): config for config in configs}).values())


def named(*folders):
    return list(labels({Path(folder): PLAIN for folder in folders}).values())


def test_a_digest_is_not_shown():
    assert called(PLAIN) == ["digits-tiny_cnn-fat-5-seed0"]


def test_parts_that_all_share_are_left_out():
    assert called(PLAIN, with_objective(PLAIN, "madry")) == ["fat", "madry"]
    assert called(PLAIN, replace(PLAIN, seed=1)) == ["seed0", "seed1"]
    assert called(PLAIN, with_objective(replace(PLAIN, seed=1), "madry")) == ["fat-5-seed0", "madry-5-seed1"]
    assert named("runs/fat-digits", "runs/madry-digits") == ["fat", "madry"]


def test_a_name_is_never_only_a_number_a_letter_or_empty():
    assert called(PLAIN, replace(PLAIN, epochs=10)) == ["fat-5", "fat-10"]
    assert called(*(replace(PLAIN, model=model) for model in ("wrn-32-10", "wrn-34-10"))) == ["wrn-32", "wrn-34"]
    for whole in (["run-1", "run-2"], ["fat-a", "fat-b"], ["a-run", "b-run"], ["run", "fat-run"], ["fat", "fat-5"]):
        assert named(*whole) == whole


def test_runs_that_differ_in_their_digests_are_named_by_settings():
    assert called(*(stronger(PLAIN, tau=constant(tau)) for tau in (0, 3))) == ["tau 0", "tau 3"]
    wide = stronger(PLAIN, eps=constant(16 / 255), step_size=0.01)
    madry = with_objective(PLAIN, "madry")
    assert called(madry, PLAIN, wide) == [
        "madry",
        "fat, eps 8/255, step size 0.007",
        "fat, eps 16/255, step size 0.01",
    ]


def test_equal_names_get_their_parent_folders():
    assert named("a/run", "b/run", "b/other") == ["a/run", "b/run", "other"]
    assert named("x/1/run", "y/1/run") == ["x/1/run", "y/1/run"]
    name = key(PLAIN)
    assert named(f"a/{name}", f"b/{name}") == [f"a/{name}", f"b/{name}"]


def test_a_date_is_not_taken_for_a_digest():
    assert named("fat-2024010112") == ["fat-2024010112"]


def test_a_run_says_how_often_it_was_resumed():
    assert [resumed(starts) for starts in (0, 1, 2, 3)] == ["", "", "resumed once", "resumed 2 times"]


LONG = "digits-tiny_cnn-fat-with-a-long-{}-name-5-seed{}"


@pytest.mark.parametrize(
    "names",
    [
        ["short", LONG.format("own", 0)],
        [LONG.format("own", 0), LONG.format("own", 1)],
        ["a" * 11 + "1" + "b" * 40, "a" * 11 + "2" + "b" * 40],
        ["a" * 20 + "1" + "b" * 40, "a" * 20 + "2" + "b" * 40],
        [LONG.format("own", 0), LONG.format("other", 0), LONG.format("own", 0)[:-6] + "seed1"],
        ["a" * 30 + str(i) + "b" * 30 for i in range(12)],
    ],
)
def test_cut_names_fit_and_stay_different(names):
    cut = shorten(names)
    assert list(cut) == names and len(set(cut.values())) == len(names)
    assert all(len(short) <= 25 and ("…" in short) == (len(name) > 25) for name, short in cut.items())
