"""Every reader of our JSON meets damaged files: each is left out with a note or refused in one line, and none escapes.

A valid file of each kind is made by the package itself; then every field of it is deleted or replaced, the file is cut,
emptied or overwritten, and hundreds of seeded random changes are made. What passes the door must reach the page.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sparring as library
from sparring.cli import compare, report
from sparring.cli.result_folder import _refuse_others
from sparring.data import load
from sparring.errors import UserError
from sparring.evaluation import Result, cache, evaluate
from sparring.evaluation.cache import Ledger, _read
from sparring.files import json_text
from sparring.files.digests import SUM, sealed
from sparring.files.json_text import Damaged, Unreadable
from sparring.launch.slurm import submitted
from sparring.paper import Workspace, carry_out, results
from sparring.paper.bound import estimate
from sparring.paper.collect import collect, table_rows
from sparring.paper.findings import findings
from sparring.paper.notes import notes
from sparring.paper.render import exhibit
from sparring.paper.specs import Row
from sparring.report import gather, panels
from sparring.report.entries import open_result
from sparring.report.gather import open_run, rows_of, rows_of_file
from sparring.report.method_charts import drawings
from sparring.report.page import write_page
from sparring.training import run_folder
from sparring.weights import measured as measured_of
from tests.files.damage import DEEP, as_a_whole, at_random, field_by_field
from tests.paper.test_render import ILLUSTRATIONS
from tests.paper.tiny import COURSE, TABLE, planned


def cases(value, *, random_ones: int = 200, skip=()):
    """(what was done, content) of every wrong version of a value."""
    for what, text in field_by_field(value, skip=skip):
        yield what, text.encode()
    yield from as_a_whole(value)
    for what, text in at_random(value, random_ones, seed=7):
        yield what, text.encode()


def one_line(error: Exception, path: Path) -> None:
    text = str(error)
    assert str(path) in text and "\n" not in text and len(text) < 1000, text


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory) -> Path:
    """A run with one evaluation of six images and one doubt."""
    folder = shutil.copytree(finished, tmp_path_factory.mktemp("damaged") / "run")
    data, model = load("digits"), library.load_model(folder)
    about = {"model": str(folder), "which": "last", "data": "digits", "command": "sparring evaluate MODEL"}
    about["facts"] = {"epoch": 2, "model": {"classes": list("0123456789")}}
    found = evaluate(model, data.test.x[:6], data.test.y[:6], "quick", eps=0.3, doubts=False, about=about)
    found = replace(found, doubts=({"name": "few-steps", "why": "why.", "evidence": "evidence.", "page": "page"},))
    (folder / "evaluation").mkdir()
    found.save(folder / "evaluation" / "quick.json")
    return folder


def through(door, path, valid, **more):
    """The contents that pass a door, and those that it refuses in one line; anything else is a surprise."""
    passed, refused = [], []
    for what, content in cases(valid, **more):
        try:
            with holding(content):
                door(path)
        except UserError as error:
            one_line(error, path)
            refused.append((what, content))
        else:
            passed.append((what, content))
    return passed, refused


@contextmanager
def holding(content):
    """Whatever file of JSON is read has this content: a disk takes milliseconds for each of thousands of files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "read_bytes", lambda path, **_: content)
        yield


def some(found, count):
    return random.Random(0).sample(found, min(count, len(found)))


def test_evaluations(run, tmp_path):
    """The door of evaluations; then what passed it, and some of what did not, in run folders and as files."""
    folder = shutil.copytree(run, tmp_path / "run")
    path = folder / "evaluation" / "quick.json"
    passed, refused = through(Result.read, path, json.loads(path.read_text()))
    assert len(refused) > 600 and len(passed) > 100
    for what, content in some(refused, 30):
        path.write_bytes(content)
        found = open_run(folder)
        (left_out,) = [*found.evaluations.damaged, *map(str, found.evaluations.others)]
        assert str(path) in left_out and rows_of(found), what
        records, (note,) = measured_of.records(folder, which="last", epoch=2)
        assert records == [] and note.startswith("left out quick.json: "), what
    rows, entries = [], []
    for number, (what, content) in enumerate(some(passed, 80)):
        path.write_bytes(content)
        found = open_run(folder)
        assert not found.evaluations.damaged and not found.evaluations.others, what
        rows += rows_of(found, f"case {number}")
        measured_of.records(folder, which="last", epoch=2)
        with suppress(UserError):  # no attack of a protocol
            entries.append(open_result(path))
            rows += rows_of_file(path, f"file {number}")
    assert len(rows) > 100 and len(entries) > 50
    # Drawn and printed together: a page costs more than a door.
    write_page(tmp_path / "page.html", title="t", lead="l", methods=rows, facts={})
    with redirect_stdout(io.StringIO()):
        compare._write_csv(entries)
        compare._show(entries)


def test_damaged_files_do_not_end_a_page_or_a_table(sparring, run, tmp_path):
    """The commands themselves: the good rows are there, and one note names each damaged file."""
    folder = shutil.copytree(run, tmp_path / "runs" / "good")
    shutil.copy(folder / "evaluation" / "quick.json", tmp_path / "mine.json")
    (folder / "evaluation" / "torn.json").write_text('{"records": [')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    said = sparring("report", "runs", "mine.json", "deep.json", "--strips", 0)
    assert said.code == 0 and said.err == "" and said.out.count("Left out: ") == 2, said
    assert "torn.json is damaged" in said.out and "deep.json is damaged" in Path("report.html").read_text()
    said = sparring("compare", "runs", "mine.json", "deep.json")
    assert said.code == 0 and said.out.count("left out: ") == 2 and "torn.json is damaged" in said.out
    for command in ("report", "compare"):
        sparring(command, "deep.json").user_error("deep.json is damaged: it is not JSON")


HISTORY = {"epoch": 1, "natural": 0.5, "pgd10": 0.1, "backprops": 1.5, "seconds": 1.0, "loss": 2.0, "lr": 0.1}


@pytest.mark.parametrize("name", [run_folder.METRICS, run_folder.ENVIRONMENT])
def test_records_and_starts_that_are_no_numbers(run, monkeypatch, name):
    """Whatever these files hold, the page has its numbers or the run is refused."""
    reader, valid = {
        run_folder.METRICS: ("whole_history", [HISTORY, {**HISTORY, "epoch": 2}]),
        run_folder.ENVIRONMENT: ("read_environment", run_folder.read_environment(run)),
    }[name]
    passed = []
    for what, text in [*field_by_field(valid), *at_random(valid, 100, seed=3)]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # the reader's own business
            continue
        monkeypatch.setattr(gather.run_folder, reader, lambda folder, value=value: value)
        try:
            found = open_run(run)
        except Damaged as error:
            one_line(error, run / name)
            continue
        assert found.hardware, what
        passed += rows_of(found, what) if found.history else []
    assert passed and drawings(passed[::10])


def test_a_loss_that_is_not_finite_is_no_damage(run, tmp_path, monkeypatch):
    records = [{**HISTORY, "epoch": epoch, "loss": loss} for epoch, loss in ((1, 2.0), (2, float("nan")))]
    assert "NaN" in json.dumps(records)  # as metrics.jsonl has it
    monkeypatch.setattr(gather.run_folder, "whole_history", lambda folder: records)
    (row, *_) = rows_of(open_run(run))
    write_page(tmp_path / "page.html", title="t", lead="l", methods=[row], facts={})
    text = (tmp_path / "page.html").read_text()
    assert "Training loss" in text and " nan" not in text.lower()


def test_configurations_that_can_be_read_reach_the_page(run, tmp_path):
    """Strange ones too: a weight decay of 1e308, texts where there were others."""
    folder = shutil.copytree(run, tmp_path / "run")
    for name in (run_folder.LAST, run_folder.BEST):  # they belong to the configuration as it was
        (folder / name).unlink(missing_ok=True)
    path = folder / run_folder.CONFIG
    valid = json.loads(path.read_text())
    valid |= {"images": "ab12", "init": "cd34"}
    texts = [text for _, text in [*field_by_field(valid), *at_random(valid, 100, seed=5)] if DEEP not in text]
    runs = []
    for number, text in enumerate(some(texts, 150)):
        with suppress(ValueError):  # a text that is not JSON is written as it is
            content = json.loads(text)
            text = json.dumps(sealed(content)) if isinstance(content, dict) and content.pop(SUM, None) else text
        path.write_text(text)
        with suppress(UserError):
            found = open_run(folder)
            runs.append(replace(found, run=replace(found.run, folder=tmp_path / f"run-{number}")))
    assert 10 < len(runs) < 120
    groups = report._groups(runs)
    rows = [row for name, group in groups.items() for row in report._averaged(name, group)]
    sweep = report._sweep(groups, rows)
    assert report._hardware(runs, {one.folder: "x" for one in runs})
    write_page(tmp_path / "page.html", title="t", lead="l", methods=rows, facts={}, sweep=sweep)


@pytest.fixture(scope="module")
def item_results(measured, tmp_path_factory):
    """Kind -> (item, results folder, file): a small result of every kind of item."""
    found = {}
    for item in (TABLE, COURSE):
        job = planned(item, measured)[-1]
        folder = tmp_path_factory.mktemp(item.kind)
        shutil.copytree(measured / "results", folder / "results")
        found[item.kind] = (item, folder / "results", folder / "results" / item.name / job.path.name)
    for kind, (measure, config) in ILLUSTRATIONS.items():
        less = {"motivation": {"points": 4}, "loss": {"images": 4}, "mixture": {"images": 4, "layers": (2,)}}[kind]
        measure = replace(measure, **less)
        item = replace(COURSE, name="fig-x", kind=kind, rows=(Row("x", "label", measure, {"lite": config}),))
        folder = tmp_path_factory.mktemp(kind)
        (job,) = planned(item, folder)
        carry_out(
            [replace(job, folder=planned(COURSE, measured)[0].folder if config else None)],
            Workspace(torch.device("cpu")),
        )
        found[kind] = (item, folder / "results", job.path)
    return found


@pytest.mark.parametrize("kind", ["table", "course", *ILLUSTRATIONS])
def test_results_of_the_papers_items(item_results, kind, monkeypatch):
    item, folder, path = item_results[kind]
    before = path.read_text()
    valid = json.loads(before)
    if kind == "motivation":
        valid["found"]["probability"] = [[0.1, 0.9], [0.2, 0.8]]  # 61 x 61 in earnest
    try:
        known = () if kind == "table" else ("config", "environment", "trained_on")  # the same in all kinds
        passed, refused = through(results.read, path, valid, random_ones=60, skip=known)
        assert len(refused) > 100 and len(passed) > 20
        for what, content in some(refused, 10):
            path.write_bytes(content)
            collected = collect(item, folder)
            (why,) = collected.unread
            assert str(path) in why and findings(collected) and why in notes(collected), what
        monkeypatch.setattr(panels, "png", lambda figure: b"")  # the figure is built, and not painted
        shown = 0
        for number, (what, content) in enumerate(some(passed, 30)):
            path.write_bytes(content)
            collected = collect(item, folder)
            assert not collected.unread and findings(collected) and notes(collected) is not None, what
            if kind == "table":
                assert table_rows(collected), what
            shown += not collected.other
            if number % 10 == 0:
                assert exhibit(collected).findings, what
        assert shown > 5
    finally:
        path.write_text(before)


def test_the_bound_of_another_model(tmp_path):
    """`sparring bound` and `evaluate` look into the results of a folder for whose they are."""
    x, y = torch.rand(12, 1, 2, 2), torch.arange(12) % 2
    bound = estimate(torch.nn.Flatten(), x, y, eps=0.1, strongest="pgd", resamples=100)
    other, mine, path = tmp_path / "other", tmp_path / "mine", tmp_path / "bound.json"
    other.touch()
    mine.touch()
    valid = {**bound.as_dict(), "about": {"model": str(other)}}
    path.write_text(json.dumps(valid))
    with pytest.raises(UserError, match="holds results of"):
        _refuse_others(tmp_path, mine, [path])
    for name in ("\0", "x" * 3000):
        path.write_text(json.dumps({"about": {"model": name}}))
        _refuse_others(tmp_path, mine, [path])
    refused = 0
    for _, content in cases(valid, random_ones=50):
        try:
            with holding(content):
                _refuse_others(tmp_path, mine, [path])
        except UserError as error:
            refused += 1
            assert "holds results of" in str(error)
    assert refused > 100


def test_jobs_of_slurm(tmp_path):
    path = tmp_path / "jobs.json"
    path.write_text("{}")
    passed, refused = through(lambda path: submitted(path.parent), path, {"fat-seed0": "12_0", "fat-seed1": "12_1"})
    assert passed and len(refused) > 50


def test_configurations_of_a_hub():
    pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub")
    from sparring.weights.hub import HubModel

    network = {"name": "tiny_cnn", "num_classes": 3, "channels": 1, "size": [8, 8], "normalize": [[0.3], [0.2]]}
    valid = {"model": {**network, "classes": ["a", "b", "c"]}, "threat": {"norm": "linf", "eps": 0.3}}
    HubModel(**valid)
    for _, content in cases(valid, random_ones=60):
        try:
            given = json.loads(content)
        except (ValueError, RecursionError):  # huggingface_hub reads the file
            continue
        if isinstance(given, dict) and given.keys() <= {"model", "threat"} and "model" in given:
            try:
                HubModel(**given)
            except UserError as error:
                assert "\n" not in str(error)


def test_verdicts_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "pgd.npz"
    ledger = Ledger.empty(9, path)
    ledger.enter(torch.arange(5), torch.tensor([True, False, True, True, False]), 1.5)
    valid = path.read_bytes()
    judged, correct, doubtful, seconds, retried = _read(path, 9)
    assert not doubtful.any()
    assert judged.tolist() == [True] * 5 + [False] * 4 and not correct[1] and (seconds, retried) == (1.5, 0)
    draw, passed = random.Random(1), 0
    changes = [valid[:cut] for cut in range(0, len(valid), 23)]
    for _ in range(300):
        content = bytearray(valid)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        changes.append(bytes(content))
    for arrays in (
        {"judged": np.zeros(9), "stands": np.ones(9, bool), "seconds": 1.0},
        {"judged": np.zeros((3, 3), bool), "stands": np.ones(9, bool), "seconds": 1.0},
        {"judged": np.zeros(9, bool), "stands": np.ones(9, bool), "seconds": np.nan},
        {"judged": np.zeros(9, bool), "stands": np.ones(9, bool), "seconds": np.zeros(2)},
        {"judged": np.zeros(9, bool), "seconds": 1.0},
        {"judged": np.zeros(9, bool), "stands": np.ones(9, bool), "doubtful": np.zeros(9), "seconds": 1.0},
        {"judged": np.zeros(9, bool), "stands": np.ones(9, bool), "doubtful": np.zeros(8, bool), "seconds": 1.0},
        {"judged": np.zeros(10**6, bool), "stands": np.ones(9, bool), "seconds": 1.0},
    ):
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)
        changes.append(file.getvalue())
    for content in [*changes, b"", b"\x93NUMPY" + bytes(100), b"[" * 1000]:
        monkeypatch.setattr(cache, "read_bytes", lambda path, content=content, **_: content)
        try:
            judged, correct, doubtful, *_ = _read(path, 9)
        except Damaged as error:
            one_line(error, path)
            assert "Delete it; only this part" in str(error)
        else:
            passed += 1
            assert judged.shape == correct.shape == doubtful.shape == (9,)
            assert judged.dtype == correct.dtype == doubtful.dtype == torch.bool
    assert passed < 100


def refusing(monkeypatch, name: str) -> None:
    """Reading files of this name fails as on a broken disk; nothing else does."""
    opened = Path.open

    def fails(self: Path, *args, **more):
        if self.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return opened(self, *args, **more)

    monkeypatch.setattr(Path, "open", fails)


def test_a_read_error_is_no_damage(sparring, run, tmp_path, monkeypatch, item_results):
    folder = shutil.copytree(run, tmp_path / "run")
    shutil.copy(folder / "evaluation" / "quick.json", tmp_path / "mine.json")
    Ledger.empty(9, tmp_path / "pgd.npz").write()
    (tmp_path / "jobs.json").write_text("{}")
    item, results_folder, path = item_results["table"]
    for name in ("quick.json", "mine.json", "pgd.npz", "jobs.json", path.name):
        refusing(monkeypatch, name)
    (why,) = open_run(folder).evaluations.damaged
    (note,) = measured_of.records(folder, which="last", epoch=2)[1]
    (unread,) = collect(item, results_folder).unread
    said = [why, note, unread]
    for read in (
        lambda: Result.read(tmp_path / "mine.json"),
        lambda: _read(tmp_path / "pgd.npz", 9),
        lambda: submitted(tmp_path),
        lambda: results.read(path),
        lambda: results.write(path, {"config": None, "measure": None}),
        lambda: _refuse_others(tmp_path, folder, [tmp_path / "mine.json"]),
    ):
        with pytest.raises(Unreadable) as caught:
            read()
        said.append(str(caught.value))
    said += [sparring("report", "mine.json").err, sparring("compare", "mine.json").err]
    said += [sparring("report", folder, "--strips", 0).out]
    for line in said:
        assert "cannot read" in line and "Input/output error" in line, line
        assert not any(word in line.lower() for word in ("damaged", "delete", "overwrite", "restore", "move it")), line
    assert path.exists() and not path.with_name(f"{path.name}.old").exists()  # nothing was put aside


def test_a_write_error_is_told_as_writing(run, tmp_path, monkeypatch):
    found = Result.read(run / "evaluation" / "quick.json")

    def full(self: Path, *args, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    opened = Path.open
    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **more: (full if self.suffix == ".tmp" else opened)(self, *args, **more)
    )
    for write in (
        lambda: found.save(tmp_path / "mine.json"),
        lambda: Ledger.empty(9, tmp_path / "pgd.npz").write(),
        lambda: results.write(tmp_path / "x.json", {"config": None, "measure": None}),
        lambda: write_page(tmp_path / "page.html", title="t", lead="l", facts={}),
    ):
        with pytest.raises(UserError, match=r"cannot write .*: the disk is full"):
            write()
    assert list(tmp_path.iterdir()) == []
