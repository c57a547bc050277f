"""What we see: made from the results, for every kind of item."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.recipes import paper
from sparring.reproduce import draw
from sparring.reproduce.collect import collect
from sparring.reproduce.verdict import seen
from tests.reproduce.test_draw import points
from tests.reproduce.tiny import COURSE, TABLE

KEPT = Path(__file__).parents[2] / "results"


def test_a_table_names_the_best_of_ours_and_of_the_papers(measured):
    said = seen(collect(TABLE, measured / "results"))
    assert (
        said.startswith("the best of the measured methods by attack: Natural ") and "the paper's FAT (89.34 %)" in said
    )


def test_a_course(measured):
    collected = collect(COURSE, measured / "results")
    course = collected.of(COURSE.rows[0])[0]["history"]["backprops"]
    assert f"grow in {int(course[-1] > course[0])} of 1 run: {course[0]:.1f} in the first epoch" in seen(collected)


def test_lines(measured, tmp_path):
    item = points(measured, tmp_path)
    assert "Natural +5.0." in seen(collect(item, tmp_path / "results"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fig-motivation", ["confirmed (3 of 3 seeds)", "76% to 93%", "10% to 21%"]),
        ("fig-loss", ["confirmed (3 of 3 seeds)", "above 1", "Not yet measured: losses-cifar10."]),
        ("fig-mixture", ["confirmed in part", "among themselves PGD-20 data are purer", "Not yet measured: wrn-40-4."]),
        ("table1", ["not yet measured."]),
    ],
)
def test_the_results_that_are_kept_here(name, parts):
    collected = collect(paper.find(name), KEPT)
    for part in parts:
        assert part in seen(collected), seen(collected)


def test_the_seed_that_is_drawn_and_the_range_over_all():
    (picture,) = draw.exhibit(collect(paper.find("fig-motivation"), KEPT)).pictures
    assert "Drawn is seed 0; in brackets the range over seeds 0, 1 and 2." in picture.caption
    assert "(76% to 93%)" in picture.caption
