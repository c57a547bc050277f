from __future__ import annotations

import threading

import pytest
import torch

from sparring.data import load
from sparring.engine import WeightAverage
from sparring.errors import UserError
from sparring.training import checkpoint, run_folder
from sparring.training.config import model_facts
from sparring.training.start import begin
from sparring.training.state import Saver, restore

CPU = torch.device("cpu")


def start(config):
    facts = model_facts(config, load("digits"))
    return begin(config, facts, CPU), facts


def test_best_is_copied_and_written_with_the_next_save(tmp_path, small):
    state, facts = start(small)
    saver = Saver(run_folder.create(tmp_path / "run", small, ""), state, facts, None)
    assert saver.idle == float("inf")
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    saver.keep(state.model, {"epoch": 1, "pgd10": 0.5})
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1.0)  # training goes on
    assert not (tmp_path / "run" / run_folder.BEST).exists()
    saver.save()
    saver.finish()
    best, last = (checkpoint.load(tmp_path / "run" / name) for name in (run_folder.BEST, run_folder.LAST))
    assert all(torch.equal(best.part("model")[name], tensor) for name, tensor in before.items())
    assert not torch.equal(last.part("model")["conv1.weight"], before["conv1.weight"])
    assert saver.pending is None and saver.idle < 60


def test_checkpoint_is_a_snapshot_written_in_the_background(tmp_path, small, monkeypatch):
    state, facts = start(small)
    run = run_folder.create(tmp_path / "run", small, "")
    go, original = threading.Event(), run_folder.RunFolder.save

    def slow(self, *file):
        assert go.wait(60)
        original(self, *file)

    monkeypatch.setattr(run_folder.RunFolder, "save", slow)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    with Saver(run, state, facts, None) as saver:
        saver.save()  # returns before anything is written
        assert not (tmp_path / "run" / run_folder.LAST).exists()
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(1.0)
        state.step = 5
        go.set()
    saved = checkpoint.load(tmp_path / "run" / run_folder.LAST)  # leaving the context waits for it
    assert saved.facts["step"] == 0
    assert all(torch.equal(saved.part("model")[name], tensor) for name, tensor in before.items())


def test_failed_save_is_raised_and_retried(tmp_path, small, monkeypatch):
    state, facts = start(small)
    run = run_folder.create(tmp_path / "run", small, "")
    original, room = run_folder.RunFolder.save, []

    def full(self, *file):
        if not room:
            raise UserError("the disk is full.")
        original(self, *file)

    monkeypatch.setattr(run_folder.RunFolder, "save", full)
    with pytest.raises(UserError, match="full"), Saver(run, state, facts, None) as saver:
        saver.save()
    assert saver.writer._shutdown and not any(thread.is_alive() for thread in saver.writer._threads)
    with Saver(run, state, facts, None) as saver:
        saver.keep(state.model, {"epoch": 1, "pgd10": 0.5})
        saver.save()
        with pytest.raises(UserError, match="full"):
            saver.save()  # the next save raises it
        room.append(True)
        state.step = 9
        saver.save()
    best, last = (checkpoint.load(tmp_path / "run" / name) for name in (run_folder.BEST, run_folder.LAST))
    assert last.facts["step"] == 9 and best.facts["epoch"] == 1  # the best is written too


def test_state_is_restored(tmp_path, small):
    state, facts = start(small)
    for parameter in state.model.parameters():
        state.optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
    state.epoch, state.step, state.tally.images = 3, 7, 21
    state.tally.backprops += 5
    average = WeightAverage(state.model, 0.5)
    average.move()
    with Saver(run_folder.create(tmp_path / "run", small, ""), state, facts, average) as saver:
        saver.save()
    saved = run_folder.open_run(tmp_path / "run").last()
    other, _ = start(small)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    restore(other, saved)
    assert (other.epoch, other.step, other.tally.images, int(other.tally.backprops)) == (3, 7, 21, 5)
    for one, two in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(state.optimizer.state[one]["momentum_buffer"], other.optimizer.state[two]["momentum_buffer"])
    assert set(saved.part("average")) == set(average.state())


def test_last_checkpoint_is_retried_at_the_end(tmp_path, small, monkeypatch):
    state, facts = start(small)
    original, tries = run_folder.RunFolder.save, []

    def full_once(self, *file):
        tries.append(file[0])
        if len(tries) == 1:
            raise UserError("the disk is full.")
        original(self, *file)

    monkeypatch.setattr(run_folder.RunFolder, "save", full_once)
    with Saver(run_folder.create(tmp_path / "run", small, ""), state, facts, None) as saver:
        state.step = 7
        saver.save()
    assert (
        tries == [run_folder.LAST, run_folder.LAST]
        and checkpoint.load(tmp_path / "run" / run_folder.LAST).facts["step"] == 7
    )
    assert saver.handed == []  # copies are freed once they are written


def test_retry_writes_the_newest_state(tmp_path, small, monkeypatch):
    state, facts = start(small)
    original, tries = run_folder.RunFolder.save, []

    def full_twice(self, *file):
        tries.append(file[2]["step"])
        if len(tries) in (1, 3):
            raise UserError("the disk is full.")
        original(self, *file)

    monkeypatch.setattr(run_folder.RunFolder, "save", full_twice)
    with Saver(run_folder.create(tmp_path / "run", small, ""), state, facts, None) as saver:
        for state.step in (1, 2, 3):
            saver.save()
    assert tries == [1, 2, 3, 3] and checkpoint.load(tmp_path / "run" / run_folder.LAST).facts["step"] == 3
