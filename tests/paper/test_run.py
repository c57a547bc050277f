"""Jobs train, measure and write once; they can be resumed, and items share runs."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from sparring.data import batches, load
from sparring.errors import UserError
from sparring.evaluation import Part, PGDAttack, Protocol
from sparring.paper import Stopped, Workspace, carry_out, results, run
from sparring.paper.collect import collect
from sparring.paper.notes import notes
from sparring.paper.plan import remaining, state
from sparring.paper.result_schema import unpack
from sparring.paper.specs import Robustness
from sparring.report import gather
from sparring.training import config as configs
from sparring.training import run_folder
from sparring.training.held_folder import claimed
from sparring.training.loop import Diverged, Interrupted
from sparring.training.run_folder import AT_ONCE
from sparring.weights import load_model
from tests.paper.tiny import COURSE, FAT, IMAGES, TABLE, planned


def found_in(job):
    """A result without what differs between two equal runs."""
    result = results.read(job.path)
    for name in (
        "environment",
        "measuring_seconds",
        "training_seconds",
        "wall_seconds",
        "peak_memory_gib",
        "starts",
        "trained_on",
    ):
        del result[name]
    for name in ("seconds", "images_per_second"):
        del result["history"][name]
    for attack in result.get("found", {}).get("attacks", {}).values():
        del attack["seconds"]
    return result


def test_a_result_records_what_was_trained_and_measured_and_how(measured):
    job = planned(TABLE, measured)[1]
    result = results.read(job.path)
    assert configs.from_json(result["config"]) == FAT
    assert (result["item"], result["row"], result["scale"], result["seed"]) == ("table-tiny", "fat", "lite", 0)
    assert result["measure"] == {"kind": "robustness", "protocol": "quick", "autoattack": 0, "limit": None}
    attacks = result["found"]["attacks"]
    assert set(attacks) == {"natural", "pgd10", "worst"}
    assert attacks["pgd10"]["eps"] == 8 / 255 and attacks["pgd10"]["n"] == IMAGES == result["found"]["n"]
    assert attacks["worst"]["accuracy"] <= attacks["pgd10"]["accuracy"] <= attacks["natural"]["accuracy"] <= 1
    assert result["history"]["epoch"] == [1, 2]
    assert result["wall_seconds"] > result["training_seconds"] > 0 and result["environment"]["torch"]
    assert job.path.stat().st_size < 10_000
    for fact in attacks.values():  # the verdicts agree with the accuracy
        assert sum(unpack(fact["right"], fact["n"])) == round(fact["accuracy"] * fact["n"])


def test_the_run_folder_has_the_evaluation_too(measured):
    """As written by `sparring evaluate`, so that a report on run folders shows it."""
    job = planned(TABLE, measured)[1]
    (line,) = gather.methods(job.folder)
    attacks = results.read(job.path)["found"]["attacks"]
    assert line.accuracies["Natural"] == attacks["natural"]["accuracy"]
    assert line.accuracies["PGD-10"] == attacks["pgd10"]["accuracy"]


def test_existing_results_are_not_made_again(measured, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("worked although every result exists")

    monkeypatch.setattr(run, "train", refuse)
    monkeypatch.setattr(run, "_measure", refuse)
    carry_out([*planned(TABLE, measured), *planned(COURSE, measured)], Workspace(torch.device("cpu")))


def test_two_items_share_a_run(tmp_path, monkeypatch):
    trained = []
    real = run.train
    monkeypatch.setattr(run, "train", lambda config, *a, **kw: trained.append(config) or real(config, *a, **kw))
    carry_out([*planned(COURSE, tmp_path), *planned(TABLE, tmp_path, rows=("fat",))], Workspace(torch.device("cpu")))
    assert trained == [FAT]


def test_interruptions_of_training_and_measuring_do_not_change_the_result(tmp_path, measured, monkeypatch):
    (job,) = planned(TABLE, tmp_path, rows=("fat",))
    steps = iter(range(1000))
    with pytest.raises(Stopped, match=r"in training \(table-tiny fat"):
        carry_out([job], Workspace(torch.device("cpu"), stop=lambda: next(steps) > 6))
    begun = results.read(job.path)
    assert begun["state"] == "interrupted" and "found" not in begun and begun["history"]["epoch"] == [1]
    assert state(job) == "interrupted" and 0 < begun["wall_seconds"] < 1000
    results.write(job.path, begun | {"wall_seconds": 1000.0, "peak_memory_gib": 2.5})

    class Broken:
        """Interrupts a measurement after its first evaluation."""

        def __enter__(self):
            real, calls = run.robustness.evaluate, iter(range(9))

            def evaluate(*args, **kwargs):
                assert next(calls) == 0
                real(*args, **{**kwargs, "doubts": False})
                raise KeyboardInterrupt

            monkeypatch.setattr(run.robustness, "evaluate", evaluate)

        def __exit__(self, *_):
            monkeypatch.undo()

    with pytest.raises(Stopped, match="while measuring"):
        carry_out([job], Workspace(torch.device("cpu"), breakable=Broken))
    assert state(job) == "trained"
    carry_out([job], Workspace(torch.device("cpu")))
    assert found_in(job) == found_in(planned(TABLE, measured)[1])
    assert results.read(job.path)["starts"] == 2
    assert results.read(job.path)["wall_seconds"] > 1000  # the sum over both starts
    assert results.read(job.path)["peak_memory_gib"] == 2.5  # the maximum


def test_a_run_with_missing_records_leaves_its_result_unchanged(tmp_path):
    (job,) = planned(TABLE, tmp_path, rows=("fat",), scale="full", seeds=(0,))
    with pytest.raises(Stopped):
        carry_out([job], Workspace(torch.device("cpu"), stop=lambda: len(run_folder.read_metrics(job.folder)) == 2))
    written = job.path.read_bytes()
    records = job.folder / run_folder.METRICS
    records.write_text(records.read_text().splitlines(keepends=True)[1])
    with pytest.raises(UserError, match="is damaged"):
        carry_out([job], Workspace(torch.device("cpu")))
    assert job.path.read_bytes() == written


def test_a_course_is_taken_from_another_items_result(tmp_path, measured, monkeypatch):
    theirs = planned(TABLE, measured)[1]
    (wanted,) = planned(TABLE, tmp_path, rows=("fat",))
    results.write(wanted.path, results.read(theirs.path))  # the result exists, the run folder does not
    monkeypatch.delattr(run, "train")
    (job,) = planned(COURSE, tmp_path)
    assert state(job) == "measured"
    carry_out([job], Workspace(torch.device("cpu")))
    assert not job.path.exists()
    (other,) = planned(COURSE, tmp_path, seeds=(1,))
    assert state(other) == "missing"


def test_a_diverged_run_is_a_result_and_the_next_rows_still_run(tmp_path, monkeypatch):
    """It is not trained again: it would diverge again."""
    real, trained = run.train, []

    def train(config, folder, **more):
        trained.append(config.objective.name)
        if config.objective.name == "madry":
            more["stop"] = lambda: True
            with pytest.raises(Interrupted):
                real(config, folder, **more)
            raise Diverged(1, 1, 0.1, "0.1")
        return real(config, folder, **more)

    monkeypatch.setattr(run, "train", train)
    lines = []
    jobs = planned(TABLE, tmp_path)
    for _ in range(2):
        carry_out(jobs, Workspace(torch.device("cpu"), log=lines.append))
    assert trained == ["madry", "fat"] and [state(job) for job in jobs] == ["diverged", "measured"]
    assert remaining(jobs) == []
    assert results.read(jobs[0].path)["diverged_in_epoch"] == 1
    assert sum("not finite in epoch 1" in line for line in lines) == 1


def test_a_result_records_the_hardware_of_every_start(measured, tmp_path, monkeypatch):
    monkeypatch.setenv(AT_ONCE, "3")
    (job,) = planned(TABLE, tmp_path, rows=("fat",))
    carry_out([job], Workspace(torch.device("cpu")))
    (start,) = results.read(job.path)["trained_on"]
    assert start["at_once"] == 3 and start["device"] == results.read(job.path)["environment"]["device"]
    assert start["torch"] == torch.__version__ and "started" not in start
    assert results.at_once(results.read(planned(TABLE, measured)[1].path)) == 1


def test_a_stop_during_the_last_epoch_prevents_the_measurement(tmp_path, monkeypatch):
    (job,) = planned(TABLE, tmp_path, rows=("fat",))
    asked, real = [], run.train

    def train(*args, **kwargs):
        model = real(*args, **kwargs)
        asked.append(True)  # after the last step, when training no longer checks
        return model

    monkeypatch.setattr(run, "train", train)
    with pytest.raises(Stopped, match="before measuring table-tiny fat"):
        carry_out([job], Workspace(torch.device("cpu"), stop=lambda: bool(asked)))


def test_a_stop_between_jobs_takes_effect_before_the_next_one(tmp_path):
    jobs = planned(TABLE, tmp_path)
    with pytest.raises(Stopped, match="before table-tiny madry"):
        carry_out(jobs, Workspace(torch.device("cpu"), stop=lambda: True))
    assert not (tmp_path / "runs").exists()


def test_result_files_have_every_list_on_one_line(measured):
    path = planned(COURSE, measured)[0].path
    text = path.read_text()
    assert json.loads(text)["history"]["epoch"] == [1, 2]
    assert '"epoch": [1,2]' in text


def test_a_table_also_has_the_best_epoch(tmp_path, monkeypatch):
    """If it is not the last; AutoAttack runs on the last epoch only."""
    real, seen = run.robustness.measure, []

    def measure(what, *args, **kwargs):
        seen.append(what.autoattack)
        return real(replace(what, autoattack=0), *args, **kwargs)

    monkeypatch.setattr(run.robustness, "measure", measure)
    row = replace(TABLE.rows[1], measure=Robustness("quick", autoattack=9))
    item = replace(TABLE, rows=(row,))
    (job,) = planned(item, tmp_path)
    with monkeypatch.context() as patched:  # make the first epoch the best
        patched.setattr("sparring.training.loop._score", lambda record: -record["epoch"])
        carry_out([job], Workspace(torch.device("cpu")))
    found = results.read(job.path)["found"]
    assert seen == [9, 0] and found["best"]["epoch"] == 1
    first = load_model(job.folder, which="best")
    x, y = next(iter(batches(load("digits").test, IMAGES)))
    natural = (first(x).argmax(dim=1) == y).double().mean().item()
    assert found["best"]["attacks"]["natural"]["accuracy"] == natural != found["attacks"]["natural"]["accuracy"]
    text = " ".join(notes(collect(item, tmp_path / "results")))
    assert "best epoch on held-out images, Natural / PGD-20: fat (seed 0, epoch 1) " + f"{100 * natural:.2f} / " in text


def test_autoattack_has_its_own_number_of_images(tmp_path, measured, monkeypatch):
    """One PGD step stands in for AutoAttack, which takes minutes."""
    real = run.robustness.evaluate
    stand_in = Protocol("autoattack", "", 8 / 255, (PGDAttack("autoattack", 1, Part(1)),))

    def evaluate(model, x, y, protocol, **kwargs):
        return real(model, x, y, stand_in if protocol == "autoattack" else protocol, **{**kwargs, "doubts": False})

    monkeypatch.setattr(run.robustness, "evaluate", evaluate)
    row = replace(TABLE.rows[1], measure=Robustness("quick", autoattack=7))
    (job,) = planned(replace(TABLE, rows=(row,)), tmp_path)
    job = replace(job, folder=planned(COURSE, measured)[0].folder)
    carry_out([job], Workspace(torch.device("cpu")))
    attacks = results.read(job.path)["found"]["attacks"]
    assert attacks["autoattack"]["n"] == 7 and attacks["autoattack"]["eps"] == 8 / 255
    assert attacks["pgd10"]["n"] == attacks["worst"]["n"] == IMAGES
    (few,) = planned(replace(TABLE, rows=(row,)), tmp_path, limit=5)
    carry_out([replace(few, folder=job.folder)], Workspace(torch.device("cpu")))
    assert results.read(few.path)["found"]["attacks"]["autoattack"]["n"] == 5


def test_a_run_that_another_process_holds_is_waited_for(measured, tmp_path, monkeypatch):
    """Nothing is written on its behalf; what the other process leaves is taken over."""
    monkeypatch.setattr(run, "_POLL", 0.0)
    first, second = planned(TABLE, tmp_path)
    said, looks = [], iter(range(1000))

    def let_go_later() -> bool:
        if next(looks) == 6:
            held.close()
            shutil.copytree(planned(TABLE, measured)[0].folder, first.folder, dirs_exist_ok=True)
            shutil.copy(planned(TABLE, measured)[0].path, first.path)
        return False

    with ExitStack() as held:
        held.enter_context(claimed(first.folder))  # a lock is the file's: it holds against this process, too
        with pytest.raises(Stopped, match="another process"):
            carry_out([first], Workspace(torch.device("cpu"), stop=lambda: next(looks) > 2))
        assert not first.path.exists()
        looks = iter(range(1000))
        first.path.parent.mkdir(parents=True, exist_ok=True)
        carry_out([first], Workspace(torch.device("cpu"), stop=let_go_later, log=said.append))
    assert said == [f"waiting for another process at {first.name}"]
    assert state(first) == "measured" and state(second) == "missing"
