"""Which results count, and what a line says of them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from sparring.paper import results
from sparring.paper.collect import _seeds, about, cells, collect, lines, notes
from tests.paper.tiny import COURSE, IMAGES, TABLE, planned


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


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ({"a": [0], "b": [0]}, "Seed: 0."),
        ({"a": [1, 0], "b": [0, 1]}, "Seeds: 0, 1."),
        ({"a": [0], "b": [1], "c": [0], "d": [1], "e": [0]}, "Seed: 0; b, d: 1."),
        ({"a": [2, 1], "b": [0], "c": [0]}, "Seed: 0; a: 1, 2."),
        ({"a": [1], "b": [0]}, "Seed: 0; a: 1."),  # as many of both
    ],
)
def test_rows_with_other_seeds_are_named(seeds, said):
    assert _seeds([{"row": row, "seed": seed} for row, several in seeds.items() for seed in several]) == said


def test_a_group_is_shown_at_one_scale(measured, tmp_path):
    copy(measured, tmp_path, scale="full")
    collected = collect(TABLE, tmp_path / "results")
    assert collected.scale("m") == "full" and collected.of(TABLE.rows[1]) and not collected.of(TABLE.rows[0])
    copy(measured, tmp_path, scale="lite")
    assert collect(TABLE, tmp_path / "results").scale("m") == "full"  # as many at both
    copy(measured, tmp_path, scale="lite", row="madry")
    collected = collect(TABLE, tmp_path / "results")
    assert collected.scale("m") == "lite" and collected.of(TABLE.rows[0])
    assert (collected.measured("lite", [0]), collected.measured("full", [0]), collected.measured("lite", [1])) == (
        2,
        1,
        0,
    )
    (told,) = [note for note in notes(collected) if "at full scale" in note]  # not to be lost
    natural = cells(collected.found["fat", "full"], TABLE.columns)["Natural"].text
    assert told.startswith("FAT at full scale (Tiny CNN, 3 epochs, 1 seed): ") and f"{natural} Natural" in told
    wanted = collect(TABLE, tmp_path / "results", wanted="full")
    assert wanted.scale("m") == "full" and wanted.of(TABLE.rows[1])[0]["scale"] == "full"
    assert collect(TABLE, measured / "results", wanted="full").scale("m") == "lite"  # where there is nothing at it


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
        training_seconds=190.0,
        sessions=3,
        peak_memory_gib=21.5,
        history={"epoch": [1, 2], "seconds": [150.0, 40.0]},  # the first has the start-up in it
        trained_on=[{"device": "NVIDIA H200", "torch": "2", "at_once": 2}],
    )
    collected = collect(TABLE, tmp_path / "results")
    assert not collected.found
    told = " ".join(notes(collected))
    assert "2 of 3 epochs, 40.0 s an epoch on NVIDIA H200 (2 runs at once), 21.5 GiB at most, sessions: 3" in told
    assert "about 4 min (2 runs at once)." in told  # 190 s and one epoch more


def test_notes_say_images_scale_hardware_and_doubts(measured, tmp_path):
    told = " ".join(notes(collect(TABLE, measured / "results")))
    assert "Lite scale: two epochs." in told and f"n = {IMAGES} test images" in told and "CPU, torch" in told
    doubt = {"name": "x", "why": "The loss does not grow.", "evidence": "", "page": ""}
    job = copy(measured, tmp_path)
    found = results.read(job.path)
    found["found"]["doubts"] = [doubt]
    results.write(job.path, found)
    assert "Doubt about FAT (seed 0): The loss does not grow." in notes(collect(TABLE, tmp_path / "results"))


def test_a_model_that_no_attack_moves_is_named(measured, tmp_path):
    job = copy(measured, tmp_path)
    assert not any("has not learned" in note for note in notes(collect(TABLE, tmp_path / "results")))
    found = results.read(job.path)
    for attack in found["found"]["attacks"].values():
        attack["accuracy"] = 0.196
        attack.pop("right", None)
    results.write(job.path, found)
    (told,) = [note for note in notes(collect(TABLE, tmp_path / "results")) if "has not learned" in note]
    assert told == "fat (seed 0) has 19.6 % natural and under every attack: it has not learned."
    found["history"]["one_class"] = [True, True]
    results.write(job.path, found)
    assert any("same class, in every epoch." in note for note in notes(collect(TABLE, tmp_path / "results")))


def test_a_course_needs_no_attacks(measured):
    collected = collect(COURSE, measured / "results")
    assert collected.measured("lite", [0]) == 1 and notes(collected)


def test_a_course_is_lent_by_the_result_of_another_item(measured, tmp_path):
    """The file came home, the run folder and the figure's own file did not."""
    lender = copy(measured, tmp_path)
    collected = collect(COURSE, tmp_path / "results")
    (result,) = collected.of(COURSE.rows[0])
    theirs = results.read(lender.path)
    assert result["history"] == theirs["history"] and result["found"] == {} and result["row"] == "fat"
    assert collected.measured("lite", [0]) == 1 and not (tmp_path / "results" / COURSE.name).exists()
    copy(measured, tmp_path, state="interrupted")  # not to its end
    assert not collect(COURSE, tmp_path / "results").found


def test_where_it_was_trained_and_where_measured(measured, tmp_path):
    gpu = {"device": "NVIDIA H200", "torch": "2.11"}
    alone, shared = {**gpu, "at_once": 1}, {**gpu, "at_once": 4}
    copy(
        measured,
        tmp_path,
        environment={"device": "CPU", "torch": "2"},
        trained_on=[alone, shared],
        training_seconds=9.0,
    )
    collected = collect(TABLE, tmp_path / "results")
    told = " ".join(notes(collected))
    assert "Trained on NVIDIA H200, torch 2.11, up to 4 runs at once; measured on CPU, torch 2." in told
    copy(measured, tmp_path, environment=gpu, trained_on=[alone])
    assert "Hardware: NVIDIA H200, torch 2.11." in " ".join(notes(collect(TABLE, tmp_path / "results")))
    copy(measured, tmp_path, environment=gpu, trained_on=[{**gpu, "at_once": None}])  # before company was noted
    assert "Hardware: NVIDIA H200, torch 2.11." in " ".join(notes(collect(TABLE, tmp_path / "results")))
    old = copy(measured, tmp_path, environment=gpu, trained_on=None)  # before sessions were kept
    assert results.trained_on(results.read(old.path)) == [gpu]


def test_a_copy_is_no_other_seed(measured, tmp_path):
    job = copy(measured, tmp_path)
    shutil.copy(job.path, job.path.with_name(f"{job.path.stem} (copy).json"))
    shutil.copy(job.path, job.path.with_name("fat-lite-seed7.json"))
    collected = collect(TABLE, tmp_path / "results")
    assert [len(several) for several in collected.found.values()] == [1] and collected.other == 2
    assert any("or copied: not shown" in note for note in notes(collected))


def test_a_run_that_diverged_is_told(measured, tmp_path):
    copy(measured, tmp_path, state="diverged", diverged_in_epoch=2)
    collected = collect(TABLE, tmp_path / "results")
    assert not collected.found
    assert "fat (lite, seed 0) diverged: its loss was not finite in epoch 2 of 2." in notes(collected)
