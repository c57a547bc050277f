"""The notes below an item: images, seeds, scale, hardware, interruptions, doubts, unfinished runs."""

from __future__ import annotations

import pytest

from sparring.paper import results
from sparring.paper.collect import collect
from sparring.paper.notes import _seeds, notes
from tests.paper.test_collect import copy
from tests.paper.tiny import IMAGES, TABLE


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        ({"a": [0], "b": [0]}, "Seed: 0."),
        ({"a": [1, 0], "b": [0, 1]}, "Seeds: 0, 1."),
        ({"a": [0], "b": [1], "c": [0], "d": [1], "e": [0]}, "Seed: 0; b, d: 1."),
        ({"a": [2, 1], "b": [0], "c": [0]}, "Seed: 0; a: 1, 2."),
        ({"a": [1], "b": [0]}, "Seed: 0; a: 1."),  # equally many
    ],
)
def test_rows_with_other_seeds_are_named(seeds, text):
    assert _seeds([{"row": row, "seed": seed} for row, several in seeds.items() for seed in several]) == text


def test_an_unfinished_run_reports_its_speed_and_the_cost_of_the_whole(measured, tmp_path):
    copy(
        measured,
        tmp_path,
        scale="full",
        state="interrupted",
        training_seconds=190.0,
        starts=3,
        peak_memory_gib=21.5,
        history={"epoch": [1, 2], "seconds": [150.0, 40.0]},  # the first includes the start-up
        trained_on=[{"device": "NVIDIA H200", "torch": "2", "at_once": 2}],
    )
    collected = collect(TABLE, tmp_path / "results")
    assert not collected.found
    text = " ".join(notes(collected))
    assert (
        "2 of 3 epochs, 40.0 s per epoch on NVIDIA H200 (2 runs at once), at most 21.5 GiB, resumed 2 times. " in text
    )
    assert "about 4 min (2 runs at once)." in text  # 190 s and one more epoch


def test_notes_give_images_scale_hardware_and_doubts(measured, tmp_path):
    text = " ".join(notes(collect(TABLE, measured / "results")))
    assert "Lite scale: two epochs." in text and f"n = {IMAGES} test images" in text and "CPU, torch" in text
    doubt = {"name": "x", "why": "The loss does not grow.", "evidence": "", "page": ""}
    job = copy(measured, tmp_path)
    found = results.read(job.path)
    found["found"]["doubts"] = [doubt]
    results.write(job.path, found)
    assert "Doubt about FAT (seed 0): The loss does not grow." in notes(collect(TABLE, tmp_path / "results"))


def test_a_model_that_no_attack_changes_is_named(measured, tmp_path):
    job = copy(measured, tmp_path)
    assert not any("has not learned" in note for note in notes(collect(TABLE, tmp_path / "results")))
    found = results.read(job.path)
    for attack in found["found"]["attacks"].values():
        attack["accuracy"] = 0.196
        attack.pop("right", None)
    results.write(job.path, found)
    (note,) = [note for note in notes(collect(TABLE, tmp_path / "results")) if "has not learned" in note]
    assert note == "fat (seed 0) has 19.6 % natural and under every attack: it has not learned."
    found["history"]["one_class"] = [True, True]
    results.write(job.path, found)
    assert any(
        "one class for all held-out images in every epoch." in note
        for note in notes(collect(TABLE, tmp_path / "results"))
    )


def test_notes_give_the_hardware_of_training_and_of_measuring(measured, tmp_path):
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
    text = " ".join(notes(collected))
    assert "Trained on NVIDIA H200, torch 2.11, up to 4 runs at once; measured on CPU, torch 2." in text
    copy(measured, tmp_path, environment=gpu, trained_on=[alone])
    assert "Hardware: NVIDIA H200, torch 2.11." in " ".join(notes(collect(TABLE, tmp_path / "results")))
    copy(measured, tmp_path, environment=gpu, trained_on=[{**gpu, "at_once": None}])  # a file that does not record it
    assert "Hardware: NVIDIA H200, torch 2.11." in " ".join(notes(collect(TABLE, tmp_path / "results")))
    bare = copy(measured, tmp_path, environment=gpu, trained_on=None)  # likewise
    assert results.trained_on(results.read(bare.path)) == [gpu]


def test_a_diverged_run_is_reported(measured, tmp_path):
    copy(measured, tmp_path, state="diverged", diverged_in_epoch=2)
    collected = collect(TABLE, tmp_path / "results")
    assert not collected.found
    assert "fat (lite, seed 0) diverged: its loss was not finite in epoch 2 of 2." in notes(collected)


@pytest.mark.parametrize(
    ("starts", "text"), [(1, ""), (2, " Interrupted: fat (seed 0), resumed once."), (4, "3 times.")]
)
def test_a_finished_run_says_how_often_it_was_resumed(measured, tmp_path, starts, text):
    copy(measured, tmp_path, starts=starts)
    (note,) = [note for note in notes(collect(TABLE, tmp_path / "results")) if "Seed: 0." in note]
    assert note.endswith(text) and ("resumed" in note) == (starts > 1)
