"""A page of hundreds of runs: drawings stay readable and few, names are counted, and each file is read once."""

from __future__ import annotations

import random
import shutil
from collections import Counter

from sparring.evaluation import Result
from sparring.report.content import Method
from sparring.report.gather import open_run, rows_of
from sparring.report.labels import several
from sparring.report.method_charts import class_drawings, drawings
from sparring.report.page import table
from sparring.report.settings import by_seed
from sparring.training import run_folder
from tests.paper.tiny import TABLE, planned


def methods(count: int, ways: int = 1) -> list[Method]:
    """Methods of which the later ones are the more robust."""
    record = {"natural": 0.9, "backprops": 2.0, "seconds": 1.0, "loss": 1.0, "lr": 0.1}
    return [
        Method(
            name=f"run-{number:03d}",
            about="",
            accuracies={"Natural": 0.9, "PGD-20": number / count},
            backprops=2.0,
            seconds=1.0,
            history=[{**record, "epoch": epoch, "pgd10": number / count} for epoch in (1, 2)],
            measured=f"way {number % ways}",
            images=f"data {number % ways}",
            by_class={"Worst case": {"a": number / count, "b": 0.5}},
        )
        for number in range(count)
    ]


def test_drawings_show_the_most_robust_of_many():
    found = drawings(methods(200))
    assert all("Drawn are the 24 of 200 that are most robust" in drawing.caption for drawing in found)
    assert "run-199" in found[0].caption and "run-176" in found[0].caption and "run-175" not in found[0].caption
    assert not any("Drawn are" in drawing.caption for drawing in drawings(methods(24)))
    (by_class,) = class_drawings(methods(200))
    assert "Drawn are the 24 of 200" in by_class.caption and by_class.svg.count("run-175") == 0


def test_ways_of_measuring_do_not_multiply_the_drawings():
    few, many = (len(drawings(methods(24, ways))) + len(class_drawings(methods(24, ways))) for ways in (6, 24))
    assert many <= few


def test_the_best_of_a_column_is_that_of_its_way_of_measuring():
    rows = table(methods(40, ways=20))
    best = [row[1].text for row in rows if row[1].best]
    assert best == [row[1].text for row in rows[20:]]  # of each two that are measured alike, the later one


def test_names_are_listed_and_counted():
    assert several(["a", "b"]) == "a, b" and several(list("abcd"), 2) == "a, b and 2 more"
    assert several([str(n) for n in range(2000)], 1) == "0 and 1,999 more"


def test_seeds_are_grouped_as_one_by_one():
    """A run joins the first group of its settings that lacks its seed."""
    draw = random.Random(0)
    runs = [({"lr": draw.randint(0, 3), "seed": draw.randint(0, 3)}, number) for number in range(80)]
    runs += [({}, 80), ({}, 81)]
    expected: list[tuple[dict, set, list]] = []
    for settings, number in runs:
        rest = {"lr": settings.get("lr")}
        fits = (one for one in expected if settings and one[0] == rest and settings["seed"] not in one[1])
        group = next(fits, None)
        if group is None:
            group = (rest if settings else {"alone": number}, set(), [])
            expected.append(group)
        group[1].add(settings.get("seed"))
        group[2].append(number)
    assert by_seed(runs) == [numbers for _, _, numbers in expected]


def test_each_file_of_a_run_is_read_once(measured, tmp_path, monkeypatch):
    """Also while the run is training: what a page says of it is of one moment."""
    job = planned(TABLE, measured)[0]
    folder = shutil.copytree(job.folder, tmp_path / "run")
    read: Counter[str] = Counter()
    for owner, name in ((Result, "read"), (run_folder, "whole_history"), (run_folder, "read_environment")):
        real = getattr(owner, name)

        def counted(path, real=real, name=name):
            read[name] += 1
            return real(path)

        monkeypatch.setattr(owner, name, counted)
    found = open_run(folder)
    assert rows_of(found) and found.hardware and found.settings and found.finished
    assert read == {
        "read": len(list((folder / "evaluation").glob("*.json"))),
        "whole_history": 1,
        "read_environment": 1,
    }
