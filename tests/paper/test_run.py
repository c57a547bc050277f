"""Train, measure, write: once, resumable, shared between items."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparring.data import batches, load
from sparring.errors import UserError
from sparring.evaluation import Part, PGDAttack, Protocol
from sparring.paper import Bench, Stopped, carry_out, results, run
from sparring.paper.collect import collect, notes
from sparring.paper.plan import state, wanting
from sparring.paper.specs import Robustness
from sparring.report import gather
from sparring.training import config as configs
from sparring.training import run_folder
from sparring.training.loop import Diverged, Interrupted
from sparring.training.run_folder import AT_ONCE
from sparring.weights import load_model
from tests.paper.tiny import COURSE, FAT, IMAGES, TABLE, planned


def found_in(job):
    """A result without what differs from one session to the next."""
    result = results.read(job.path)
    for name in ("environment", "measuring_seconds", "training_seconds", "sessions", "trained_on"):
        del result[name]
    for name in ("seconds", "images_per_second"):
        del result["history"][name]
    for attack in result.get("found", {}).get("attacks", {}).values():
        del attack["seconds"]
    return result


def test_a_result_says_what_was_made_and_how(measured):
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
    assert result["training_seconds"] > 0 and result["environment"]["torch"]
    assert job.path.stat().st_size < 10_000
    for fact in attacks.values():  # the verdicts behind the number
        assert sum(results.unpack(fact["right"], fact["n"])) == round(fact["accuracy"] * fact["n"])


def test_the_run_folder_has_the_evaluation_too(measured):
    """As `sparring evaluate` writes it: so a report on run folders shows what was measured."""
    job = planned(TABLE, measured)[1]
    (line,) = gather.methods(job.folder)
    attacks = results.read(job.path)["found"]["attacks"]
    assert line.accuracies["Natural"] == attacks["natural"]["accuracy"]
    assert line.accuracies["PGD-10"] == attacks["pgd10"]["accuracy"]


def test_what_is_there_is_not_made_again(measured, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("worked although everything was there")

    monkeypatch.setattr(run, "train", refuse)
    monkeypatch.setattr(run, "_measure", refuse)
    carry_out([*planned(TABLE, measured), *planned(COURSE, measured)], Bench(torch.device("cpu")))


def test_two_items_share_a_run(tmp_path, monkeypatch):
    trained = []
    really = run.train
    monkeypatch.setattr(run, "train", lambda config, *a, **kw: trained.append(config) or really(config, *a, **kw))
    carry_out([*planned(COURSE, tmp_path), *planned(TABLE, tmp_path, rows=("fat",))], Bench(torch.device("cpu")))
    assert trained == [FAT]


def test_a_stop_in_training_and_one_in_measuring_change_nothing(tmp_path, measured, monkeypatch):
    (job,) = planned(TABLE, tmp_path, rows=("fat",))
    steps = iter(range(1000))
    with pytest.raises(Stopped, match=r"in training \(table-tiny fat"):
        carry_out([job], Bench(torch.device("cpu"), stop=lambda: next(steps) > 6))
    begun = results.read(job.path)
    assert begun["state"] == "interrupted" and "found" not in begun and begun["history"]["epoch"] == [1]
    assert state(job) == "interrupted"

    class Broken:
        """Breaks a measurement off at its second attack."""

        def __enter__(self):
            really, calls = run.robustness.evaluate, iter(range(9))

            def evaluate(*args, **kwargs):
                assert next(calls) == 0
                really(*args, **{**kwargs, "doubts": False})
                raise KeyboardInterrupt

            monkeypatch.setattr(run.robustness, "evaluate", evaluate)

        def __exit__(self, *_):
            monkeypatch.undo()

    with pytest.raises(Stopped, match="while measuring"):
        carry_out([job], Bench(torch.device("cpu"), breakable=Broken))
    assert state(job) == "trained"
    carry_out([job], Bench(torch.device("cpu")))
    assert found_in(job) == found_in(planned(TABLE, measured)[1])
    assert results.read(job.path)["sessions"] == 2


def test_a_run_whose_records_were_cut_leaves_its_result_as_it_was(tmp_path):
    (job,) = planned(TABLE, tmp_path, rows=("fat",), scale="full", seeds=(0,))
    with pytest.raises(Stopped):
        carry_out([job], Bench(torch.device("cpu"), stop=lambda: len(run_folder.read_metrics(job.folder)) == 2))
    before = job.path.read_bytes()
    records = job.folder / run_folder.METRICS
    records.write_text(records.read_text().splitlines(keepends=True)[1])
    with pytest.raises(UserError, match="is damaged"):
        carry_out([job], Bench(torch.device("cpu")))
    assert job.path.read_bytes() == before


def test_a_course_is_lent_where_the_run_itself_is_gone(tmp_path, measured, monkeypatch):
    theirs = planned(TABLE, measured)[1]
    (wanted,) = planned(TABLE, tmp_path, rows=("fat",))
    results.write(wanted.path, results.read(theirs.path))  # the file came home, the run folder did not
    monkeypatch.delattr(run, "train")
    (job,) = planned(COURSE, tmp_path)
    assert state(job) == "measured"
    carry_out([job], Bench(torch.device("cpu")))
    assert not job.path.exists()
    (other,) = planned(COURSE, tmp_path, seeds=(1,))
    assert state(other) == "missing"


def test_a_run_that_diverges_is_a_result_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    """It would diverge again: it is not trained again, and the rows behind it are."""
    really, trained = run.train, []

    def train(config, folder, **more):
        trained.append(config.objective.name)
        if config.objective.name == "madry":
            more["stop"] = lambda: True
            with pytest.raises(Interrupted):
                really(config, folder, **more)
            raise Diverged(1, 1, 0.1, "0.1")
        return really(config, folder, **more)

    monkeypatch.setattr(run, "train", train)
    said = []
    jobs = planned(TABLE, tmp_path)
    for _ in range(2):
        carry_out(jobs, Bench(torch.device("cpu"), tell=said.append))
    assert trained == ["madry", "fat"] and [state(job) for job in jobs] == ["diverged", "measured"]
    assert wanting(jobs) == []
    assert results.read(jobs[0].path)["diverged_in_epoch"] == 1
    assert sum("not finite in epoch 1" in line for line in said) == 1


def test_a_result_says_where_every_session_trained_it(measured, tmp_path, monkeypatch):
    monkeypatch.setenv(AT_ONCE, "3")
    (job,) = planned(TABLE, tmp_path, rows=("fat",))
    carry_out([job], Bench(torch.device("cpu")))
    (session,) = results.read(job.path)["trained_on"]
    assert session["at_once"] == 3 and session["device"] == results.read(job.path)["environment"]["device"]
    assert session["started"].endswith("Z") and session["torch"] == torch.__version__
    assert results.at_once(results.read(planned(TABLE, measured)[1].path)) == 1


def test_a_stop_in_the_last_epoch_comes_before_the_measurement(tmp_path, monkeypatch):
    (job,) = planned(TABLE, tmp_path, rows=("fat",))
    asked, really = [], run.train

    def train(*args, **kwargs):
        model = really(*args, **kwargs)
        asked.append(True)  # after the last step, where training does not ask any more
        return model

    monkeypatch.setattr(run, "train", train)
    with pytest.raises(Stopped, match="before measuring table-tiny fat"):
        carry_out([job], Bench(torch.device("cpu"), stop=lambda: bool(asked)))


def test_a_stop_between_jobs(tmp_path):
    jobs = planned(TABLE, tmp_path)
    with pytest.raises(Stopped, match="before table-tiny madry"):
        carry_out(jobs, Bench(torch.device("cpu"), stop=lambda: True))
    assert not (tmp_path / "runs").exists()


def test_files_are_json_with_lists_on_one_line(measured):
    path = planned(COURSE, measured)[0].path
    text = path.read_text()
    assert json.loads(text)["history"]["epoch"] == [1, 2]
    assert '"epoch": [1,2]' in text


def test_a_table_also_has_the_best_epoch(tmp_path, monkeypatch):
    """Where that is not the last; AutoAttack is for the last alone."""
    really, seen = run.robustness.measure, []

    def measure(what, *args, **kwargs):
        seen.append(what.autoattack)
        return really(replace(what, autoattack=0), *args, **kwargs)

    monkeypatch.setattr(run.robustness, "measure", measure)
    row = replace(TABLE.rows[1], measure=Robustness("quick", autoattack=9))
    item = replace(TABLE, rows=(row,))
    (job,) = planned(item, tmp_path)
    with monkeypatch.context() as patched:  # the first epoch is to be the best
        patched.setattr("sparring.training.loop._score", lambda record: -record["epoch"])
        carry_out([job], Bench(torch.device("cpu")))
    found = results.read(job.path)["found"]
    assert seen == [9, 0] and found["best"]["epoch"] == 1
    first = load_model(job.folder, which="best")
    x, y = next(iter(batches(load("digits").test, IMAGES)))
    natural = (first(x).argmax(dim=1) == y).double().mean().item()
    assert found["best"]["attacks"]["natural"]["accuracy"] == natural != found["attacks"]["natural"]["accuracy"]
    told = " ".join(notes(collect(item, tmp_path / "results")))
    assert "best on held-out images, Natural / PGD-20: fat (seed 0, epoch 1) " + f"{100 * natural:.2f} / " in told


def test_autoattack_has_its_own_images(tmp_path, measured, monkeypatch):
    """AutoAttack itself takes minutes here: one step stands for it."""
    really = run.robustness.evaluate
    stand_in = Protocol("autoattack", "", 8 / 255, (PGDAttack("autoattack", 1, Part(1)),))

    def evaluate(model, x, y, protocol, **kwargs):
        return really(model, x, y, stand_in if protocol == "autoattack" else protocol, **{**kwargs, "doubts": False})

    monkeypatch.setattr(run.robustness, "evaluate", evaluate)
    row = replace(TABLE.rows[1], measure=Robustness("quick", autoattack=7))
    (job,) = planned(replace(TABLE, rows=(row,)), tmp_path)
    job = replace(job, folder=planned(COURSE, measured)[0].folder)
    carry_out([job], Bench(torch.device("cpu")))
    attacks = results.read(job.path)["found"]["attacks"]
    assert attacks["autoattack"]["n"] == 7 and attacks["autoattack"]["eps"] == 8 / 255
    assert attacks["pgd10"]["n"] == attacks["worst"]["n"] == IMAGES
    (few,) = planned(replace(TABLE, rows=(row,)), tmp_path, limit=5)
    carry_out([replace(few, folder=job.folder)], Bench(torch.device("cpu")))
    assert results.read(few.path)["found"]["attacks"]["autoattack"]["n"] == 5
