"""Which results count, and what a line says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparring.reproduce import results
from sparring.reproduce.collect import about, cells, collect, lines, notes
from tests.reproduce.tiny import COURSE, IMAGES, TABLE, planned


def copy(measured, folder, item=TABLE, row="fat", scale="lite", seed=0, **change):
    """The result of a row, written as if it came of this scale and seed, and otherwise changed."""
    (job,) = planned(item, measured, rows=(row,))
    (wanted,) = planned(item, folder, rows=(row,), scale=scale, seeds=(seed,))
    results.write(wanted.path, {**results.read(job.path), **wanted.declared, "scale": scale, "seed": seed, **change})
    return wanted


def test_a_table_has_every_row_measured_or_not(measured, tmp_path):
    both = lines(collect(TABLE, measured / "results"))
    assert [line.label for line in both] == ["Madry", "FAT"]
    assert all(set(line.ours) == set(TABLE.columns) for line in both)
    found = results.read(planned(TABLE, measured)[1].path)["found"]["attacks"]
    assert both[1].ours["PGD-20"].values == (found["pgd10"]["accuracy"],) and both[1].ours["PGD-20"].n == IMAGES
    assert both[1].about == "Tiny CNN, 2 epochs, 1 seed" and both[0].backprops == 2.0 > both[1].backprops > 0
    none = lines(collect(TABLE, tmp_path))
    assert [line.ours for line in none] == [{}, {}] and none[1].paper["Natural"] == (89.34, 0.221)


def test_seeds_are_put_together(measured, tmp_path):
    for seed, accuracy in ((0, 0.2), (1, 0.4), (2, 0.9)):
        copy(measured, tmp_path, seed=seed, found={"attacks": {"natural": {"accuracy": accuracy, "n": 10}}})
    several = collect(TABLE, tmp_path / "results").of(TABLE.rows[1])
    assert [result["seed"] for result in several] == [0, 1, 2]
    cell = cells(several, TABLE.columns)["Natural"]
    assert cell.middle == pytest.approx(40.0) and cell.spread == pytest.approx(36.0555, abs=1e-3)
    assert about(several).endswith("3 seeds")


def test_a_group_is_shown_at_one_scale(measured, tmp_path):
    copy(measured, tmp_path, scale="full")
    collected = collect(TABLE, tmp_path / "results")
    assert collected.scale("m") == "full" and collected.of(TABLE.rows[1]) and not collected.of(TABLE.rows[0])
    copy(measured, tmp_path, scale="lite")
    assert collect(TABLE, tmp_path / "results").scale("m") == "full"  # as many at both
    copy(measured, tmp_path, scale="lite", row="madry")
    collected = collect(TABLE, tmp_path / "results")
    assert collected.scale("m") == "lite" and collected.of(TABLE.rows[0])
    assert (collected.measured("lite"), collected.measured("full")) == (2, 1)


def test_an_older_declaration_is_counted_and_not_shown(measured, tmp_path):
    job = copy(measured, tmp_path)
    found = results.read(job.path)
    found["config"]["weight_decay"] = 1.0
    results.write(job.path, found)
    collected = collect(TABLE, tmp_path / "results")
    assert not collected.found and collected.other == 1
    assert any("1 result here was made by another declaration" in note for note in notes(collected))
    gone = replace(TABLE, rows=TABLE.rows[:1])
    assert collect(gone, tmp_path / "results").other == 1


def test_an_unfinished_run_tells_its_speed_and_the_cost_of_the_whole(measured, tmp_path):
    copy(
        measured,
        tmp_path,
        scale="full",
        state="interrupted",
        training_seconds=80.0,
        sessions=3,
        peak_memory_gib=21.5,
        history={"epoch": [1, 2]},
        environment={"device": "NVIDIA H200", "torch": "2"},
    )
    collected = collect(TABLE, tmp_path / "results")
    assert not collected.found
    told = " ".join(notes(collected))
    assert "2 of 3 epochs, 40.0 s an epoch on NVIDIA H200, 21.5 GiB at most, sessions: 3" in told
    assert "about 2 min" in told


def test_notes_say_images_scale_hardware_and_doubts(measured, tmp_path):
    told = " ".join(notes(collect(TABLE, measured / "results")))
    assert "Lite scale: two epochs." in told and f"n = {IMAGES} test images" in told and "CPU, torch" in told
    doubt = {"name": "x", "why": "The loss does not grow.", "evidence": "", "page": ""}
    job = copy(measured, tmp_path)
    found = results.read(job.path)
    found["found"]["doubts"] = [doubt]
    results.write(job.path, found)
    assert "Doubt about fat (seed 0): The loss does not grow." in notes(collect(TABLE, tmp_path / "results"))


def test_a_course_needs_no_attacks(measured):
    collected = collect(COURSE, measured / "results")
    assert collected.measured("lite") == 1 and notes(collected)
