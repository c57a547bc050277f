"""Which results count, at which scale a group is shown, and the rows of a table."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from sparring.paper import results
from sparring.paper.collect import about, cells, collect, table_rows
from sparring.paper.notes import notes
from tests.paper.tiny import COURSE, IMAGES, TABLE, planned


def copy(measured, folder, item=TABLE, row="fat", scale="lite", seed=0, **change):
    """Write the result of a row as one of this scale and seed, with further changes."""
    (job,) = planned(item, measured, rows=(row,))
    (wanted,) = planned(item, folder, rows=(row,), scale=scale, seeds=(seed,))
    whole = {**results.read(job.path), **wanted.declared, "scale": scale, "seed": seed}
    if wanted.config is not None:  # as long a history as its configuration says
        epochs = wanted.config.epochs
        whole["history"] = {name: [*values, *values][:epochs] for name, values in whole["history"].items()}
    results.write(wanted.path, {**whole, **change})
    return wanted


def test_a_table_has_every_row_measured_or_not(measured, tmp_path):
    both = table_rows(collect(TABLE, measured / "results"))
    assert [row.label for row in both] == ["Madry", "FAT"]
    assert all(set(row.ours) == set(TABLE.columns) for row in both)
    found = results.read(planned(TABLE, measured)[1].path)["found"]["attacks"]
    assert both[1].ours["PGD-20"].values == (found["pgd10"]["accuracy"],) and both[1].ours["PGD-20"].n == IMAGES
    assert both[1].about == "Tiny CNN, 2 epochs, 1 seed" and both[0].backprops == 2.0 > both[1].backprops > 0
    none = table_rows(collect(TABLE, tmp_path))
    assert [row.ours for row in none] == [{}, {}] and none[1].paper["Natural"] == (89.34, 0.221)


def test_seeds_of_a_row_are_collected(measured, tmp_path):
    for seed, accuracy in ((0, 0.2), (1, 0.4), (2, 0.9)):
        copy(measured, tmp_path, seed=seed, found={"attacks": {"natural": {"accuracy": accuracy, "n": 10}}})
    several = collect(TABLE, tmp_path / "results").of(TABLE.rows[1])
    assert [result["seed"] for result in several] == [0, 1, 2]
    cell = cells(several, TABLE.columns)["Natural"]
    assert cell.median == pytest.approx(40.0) and cell.spread == pytest.approx(36.0555, abs=1e-3)
    assert about(several).endswith("3 seeds")


def test_all_rows_of_a_group_are_shown_at_one_scale(measured, tmp_path):
    copy(measured, tmp_path, scale="full")
    collected = collect(TABLE, tmp_path / "results")
    assert collected.scale("m") == "full" and collected.of(TABLE.rows[1]) and not collected.of(TABLE.rows[0])
    copy(measured, tmp_path, scale="lite")
    assert collect(TABLE, tmp_path / "results").scale("m") == "full"  # equally many at both
    copy(measured, tmp_path, scale="lite", row="madry")
    collected = collect(TABLE, tmp_path / "results")
    assert collected.scale("m") == "lite" and collected.of(TABLE.rows[0])
    assert (collected.measured("lite", [0]), collected.measured("full", [0]), collected.measured("lite", [1])) == (
        2,
        1,
        0,
    )
    (note,) = [note for note in notes(collected) if "at full scale" in note]
    natural = cells(collected.found["fat", "full"], TABLE.columns)["Natural"].text
    assert note.startswith("FAT at full scale (Tiny CNN, 3 epochs, 1 seed): ") and f"{natural} Natural" in note
    wanted = collect(TABLE, tmp_path / "results", wanted="full")
    assert wanted.scale("m") == "full" and wanted.of(TABLE.rows[1])[0]["scale"] == "full"
    assert collect(TABLE, measured / "results", wanted="full").scale("m") == "lite"  # nothing at full


def test_results_with_another_declaration_are_counted_and_not_shown(measured, tmp_path):
    job = copy(measured, tmp_path)
    found = results.read(job.path)
    found["config"]["weight_decay"] = 1.0
    results.write(job.path, found)
    collected = collect(TABLE, tmp_path / "results")
    assert not collected.found and collected.other == 1
    assert any("1 file is a copy, or has another declaration" in note for note in notes(collected))
    gone = replace(TABLE, rows=TABLE.rows[:1])
    assert collect(gone, tmp_path / "results").other == 1


def test_a_course_has_no_attacks(measured):
    collected = collect(COURSE, measured / "results")
    assert collected.measured("lite", [0]) == 1 and notes(collected)


def test_a_course_is_taken_from_the_result_of_another_item(measured, tmp_path):
    """Neither the run folder nor the figure's own file is needed."""
    source = copy(measured, tmp_path)
    collected = collect(COURSE, tmp_path / "results")
    (result,) = collected.of(COURSE.rows[0])
    theirs = results.read(source.path)
    assert result["history"] == theirs["history"] and result["found"] == {} and result["row"] == "fat"
    assert collected.measured("lite", [0]) == 1 and not (tmp_path / "results" / COURSE.name).exists()
    copy(measured, tmp_path, state="interrupted")  # unfinished
    assert not collect(COURSE, tmp_path / "results").found


def test_a_copied_file_is_not_another_seed(measured, tmp_path):
    job = copy(measured, tmp_path)
    shutil.copy(job.path, job.path.with_name(f"{job.path.stem} (copy).json"))
    shutil.copy(job.path, job.path.with_name("fat-lite-seed7.json"))
    collected = collect(TABLE, tmp_path / "results")
    assert [len(several) for several in collected.found.values()] == [1] and collected.other == 2
    assert any("2 files are copies" in note for note in notes(collected))
