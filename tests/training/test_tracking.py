"""Trackers: by name, several at once; a package that is missing is refused early, and a failure ends no run."""

from __future__ import annotations

import csv
import errno
import gc
import io
import json
import os
import sys
import threading
from dataclasses import replace
from types import ModuleType

import pytest

from sparring.errors import UserError
from sparring.training import loop, run_folder
from sparring.training.config import with_objective
from sparring.training.trackers import TRACKERS, TensorBoard, follow, identity
from sparring.training.tracking import EpochLog, Together


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", "events.out")


class Recorder:
    """A tracker that keeps what it was told."""

    def __init__(self, fails=""):
        self.told, self.fails = [], fails

    def begin(self, config, *, steps, epoch, engine):
        self._tell("begin", epoch)

    def step(self, epoch, step, backprops):
        self._tell("step", (epoch, step))

    def epoch(self, record, *, best):
        self._tell("epoch", record["epoch"])

    def end(self):
        self._tell("end", None)

    def _tell(self, what, value):
        self.told.append((what, value))
        if what == self.fails:
            raise RuntimeError("mine")


def test_events_are_written(tmp_path):
    pytest.importorskip("tensorboard", reason="comes with pip install -e '.[dev]'")
    board = TensorBoard(tmp_path, 1)
    board.add({"epoch": 1, "natural": 0.5, "own": None})
    board.close()
    (path,) = tmp_path.glob("events.*")
    written = path.read_bytes()
    assert b"natural" in written and b"own" not in written


def test_tensorboard_reads_the_events_and_hides_those_of_an_earlier_start(tmp_path):
    pytest.importorskip("tensorboard", reason="comes with pip install -e '.[dev]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, epochs in ((1, (1, 2, 3)), (3, (3, 4))):  # the second start repeats epoch 3
        board = TensorBoard(tmp_path, first)
        for epoch in epochs:
            board.add({"epoch": epoch, "natural": epoch / 10 + first, "loss": float("nan"), "own": None})
        board.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Tags()["scalars"] == ["epoch", "natural", "loss"]
    found = [(event.step, round(event.value, 4)) for event in read.Scalars("natural")]
    assert found == [(1, 1.1), (2, 1.2), (3, 3.3), (4, 3.4)]


@pytest.mark.parametrize("fault", ["full", "half", "gone"])
def test_events_that_cannot_be_written_cost_one_note_and_no_traceback(tmp_path, small, fault, capfd, monkeypatch):
    """No thread is left to print: what is reported is reported here, once."""
    pytest.importorskip("tensorboard", reason="comes with pip install -e '.[dev]'")
    monkeypatch.setattr(threading, "excepthook", lambda given: pytest.fail(str(given)))
    folder, threads = tmp_path / "run", threading.active_count()
    folder.mkdir()
    log = EpochLog("tensorboard", lambda config, epoch: TensorBoard(folder, epoch))
    if fault == "gone":
        folder.rmdir()
    log.begin(small, steps=1, epoch=1, engine="")
    if fault == "full":
        log.log.file = io.FileIO("/dev/full", "wb")  # every write: no space left on device
    elif fault == "half":
        log.log.file = Half(log.log.file)
    whole = sum(path.stat().st_size for path in folder.glob("events.*"))
    for epoch in (1, 2):
        log.epoch({"epoch": epoch, "natural": 0.5}, best=False)
    log.end()
    del log
    gc.collect()  # a buffer that is flushed here would print
    said = capfd.readouterr().err
    why = "No such file or directory" if fault == "gone" else "No space left on device"
    assert said.count("\n") == 1 and why in said and said.endswith("The run goes on.\n"), said
    assert threading.active_count() == threads
    assert sum(path.stat().st_size for path in folder.glob("events.*")) == whole  # no half of a record is left


class Half(io.FileIO):
    """A file on a disk with room for five more bytes."""

    def __init__(self, file):
        super().__init__(file.name, "ab")
        file.close()
        self.begun = self.tell()

    def write(self, content):
        if self.tell() > self.begun:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content[:5])


@pytest.mark.parametrize("broken", ["start", "add", "close"])
def test_a_failing_log_costs_one_note(small, broken, capsys):
    class Log:
        add = full if broken == "add" else lambda *args: None
        close = full if broken == "close" else lambda *args: None

    log = EpochLog("csv", full if broken == "start" else lambda config, epoch: Log())
    log.begin(small, steps=1, epoch=1, engine="")
    for epoch in (1, 2):
        log.step(epoch, 1, lambda: 1.0)
        log.epoch({"epoch": epoch}, best=False)
    log.end()
    note = "note: nothing more goes to csv: No space left on device. The run goes on.\n"
    assert capsys.readouterr().err == note


def test_a_finished_run_opens_no_log(small):
    log = EpochLog("csv", full)
    log.begin(small, steps=1, epoch=small.epochs + 1, engine="")
    assert log.log is None


def test_every_tracker_is_told_the_end():
    first, second = Recorder(fails="end"), Recorder()
    with pytest.raises(RuntimeError, match="mine"):
        Together([first, second]).end()
    assert second.told == [("end", None)]


def test_a_csv_file_follows_the_records_through_a_resumed_run(tmp_path, small):
    small = with_objective(replace(small, epochs=2), steps=1)
    steps = iter(range(100))
    with pytest.raises(loop.Interrupted):
        loop.train(small, tmp_path / "run", tracker="csv", tensorboard=False, stop=lambda: next(steps) == 6)
    own = Recorder()
    loop.train(small, tmp_path / "run", tracker=[own, "csv"], tensorboard=False, resume=True)
    with (tmp_path / "run" / run_folder.CSV).open() as file:
        rows = list(csv.DictReader(file))
    records = run_folder.read_metrics(tmp_path / "run")
    assert [int(row["epoch"]) for row in rows] == [record["epoch"] for record in records] == [1, 2]
    assert [float(row["loss"]) for row in rows] == [record["loss"] for record in records]
    assert own.told[0][0] == "begin" and own.told[-2:] == [("epoch", 2), ("end", None)]
    run_folder.create(tmp_path / "run", small, "", overwrite=True)
    assert not (tmp_path / "run" / run_folder.CSV).exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_settings_and_every_epoch(tmp_path, small, name, monkeypatch):
    class Run:
        def log(self, numbers, step):
            told.append((step, numbers))

        def finish(self):
            told.append("finished")

    def init(**options):
        told.append(options)
        return Run()

    told = []
    small = with_objective(replace(small, epochs=1), steps=1)
    module = ModuleType(name)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
    loop.train(small, tmp_path / "my-run", tracker=name, tensorboard=False)
    options, *epochs, last = told
    assert options["name"].startswith("my-run") and options["resume"] == "allow" and options["project"] == "sparring"
    assert options["config"]["epochs"] == 1 and options["config"]["attack.steps"] == 1
    json.dumps(options["config"])
    assert [step for step, _ in epochs] == [1] and last == "finished"
    assert epochs[0][1]["natural"] == run_folder.read_metrics(tmp_path / "my-run")[0]["natural"]


def test_a_resumed_run_has_the_same_identity_and_an_overwritten_one_another(tmp_path):
    path = tmp_path / run_folder.ENVIRONMENT
    path.write_text('[{"started": "one"}]')
    first = identity(tmp_path)
    path.write_text('[{"started": "one"}, {"started": "two"}]')
    assert identity(tmp_path) == first
    path.write_text('[{"started": "two"}]')
    assert identity(tmp_path) != first


class Unfinished:
    """Has not the methods of a tracker."""

    def begin(self): ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensorbord", "unknown tracker 'tensorbord'. Did you mean 'tensorboard'"),
        (["csv", "wandb"], "needs the package wandb, which is not installed. Install it: pip install wandb"),
        ("trackio", "pip install trackio"),
        (Unfinished(), "begin, step, epoch and end, or a list of them; got Unfinished"),
        (Recorder, "got the class Recorder"),
        ([3], "got int"),
        (3, "got int"),
    ],
)
def test_a_wrong_tracker_is_refused_before_a_folder_is_made(tmp_path, small, given, message, monkeypatch):
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # an import fails
    with pytest.raises(UserError, match=message):
        loop.train(small, tmp_path / "run", tracker=given, tensorboard=False)
    assert not (tmp_path / "run").exists()


def test_tensorboard_by_default_is_no_error_where_it_is_missing(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    followers = follow(None, tmp_path, tensorboard=True)
    followers.begin(small, steps=1, epoch=1, engine="")
    followers.epoch({"epoch": 1}, best=False)
    followers.end()
    assert capsys.readouterr().err == (
        "note: no TensorBoard events: the package tensorboard is not installed (pip install tensorboard).\n"
    )
    with pytest.raises(UserError, match="needs the package tensorboard"):
        follow("tensorboard", tmp_path, tensorboard=True)
    assert set(TRACKERS) == {"csv", "tensorboard", "wandb", "trackio"}
