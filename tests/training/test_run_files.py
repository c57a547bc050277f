"""The files of a run, damaged, edited, mixed up or unreadable: one line each, and no run continues as another."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparring.errors import RunFailed, UserError
from sparring.files.json_text import Damaged, Unreadable
from sparring.report import gather
from sparring.training import checkpoint, run_folder
from sparring.training.config import Config
from sparring.training.loop import Interrupted, train
from sparring.weights import load, load_model
from tests.doctored import doctor

CONFIG, LAST, BEST, METRICS = run_folder.CONFIG, run_folder.LAST, run_folder.BEST, run_folder.METRICS


@pytest.fixture(scope="module")
def quick(small: Config) -> Config:
    return replace(small, epochs=2, batch_size=512)


@pytest.fixture(scope="module")
def made(tmp_path_factory, quick: Config) -> Path:
    """A run stopped in its second epoch; tests copy it."""
    folder, steps = tmp_path_factory.mktemp("made") / "run", iter(range(100))
    with pytest.raises(Interrupted):
        train(quick, folder, tensorboard=False, stop=lambda: next(steps) == 3)
    assert len(run_folder.read_metrics(folder)) == 1
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def resume(run: Path, config: Config, **how: Any) -> None:
    train(config, run, resume=True, tensorboard=False, **how)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["config"].update(weight_decay=2e-3),
        lambda content: content["config"].update(seed=1),
        lambda content: content["config"].pop("attack"),
        lambda content: content["config"]["attack"].pop("tau"),
        lambda content: content.update(images="0" * 16),
        lambda content: content.update(before=["0" * 64]),
        lambda content: content.pop("sha256"),
    ],
)
def test_an_edited_configuration_does_not_go_on(run, quick, change):
    edit(run / CONFIG, change)
    before = (run / LAST).read_bytes()
    with pytest.raises(Damaged, match=r"config\.json (was edited|is damaged)") as caught:
        resume(run, quick)
    assert (run / LAST).read_bytes() == before and "overwrite" not in str(caught.value)


def test_edited_records_do_not_go_on(run, quick):
    text = (run / METRICS).read_text()
    (run / METRICS).write_text(text.replace('"natural": ', '"natural": 0'))
    assert run_folder.read_metrics(run) != [json.loads(text)]
    for read in (lambda: resume(run, quick), lambda: run_folder.whole_history(run)):
        with pytest.raises(Damaged, match=r"metrics\.jsonl (was edited|is damaged)"):
            read()
    record = json.loads(text)
    (run / METRICS).write_text(json.dumps({**record, "loss": record["loss"] + 0.5}) + "\n")
    for read in (lambda: resume(run, quick), lambda: run_folder.whole_history(run)):
        with pytest.raises(Damaged, match="its first 1 epochs are not those of last"):
            read()
    (run / METRICS).write_text(json.dumps(dict(reversed(record.items()))) + "\n")  # the order of names says nothing
    assert run_folder.whole_history(run) == [record]


@pytest.mark.parametrize("name", [LAST, BEST])
def test_a_checkpoint_of_another_run_does_not_go_on(run, quick, tmp_path, name):
    other = replace(quick, seed=1, epochs=1)
    train(other, tmp_path / "other", tensorboard=False)
    shutil.copy(tmp_path / "other" / name, run / name)
    with pytest.raises(Damaged, match=f"{name} belongs to another configuration than config.json"):
        resume(run, quick)


@pytest.mark.parametrize("name", [LAST, BEST])
def test_a_checkpoint_of_another_run_is_neither_loaded_nor_shown(run, quick, tmp_path, name):
    train(replace(quick, seed=1, epochs=1), tmp_path / "other", tensorboard=False)
    shutil.copy(tmp_path / "other" / name, run / name)
    for read in (lambda: load_model(run, which=name.partition(".")[0]), lambda: gather.open_run(run)):
        with pytest.raises(Damaged, match=f"{name} belongs to another configuration"):
            read()


def test_weights_without_their_configuration_are_loaded_with_a_note(run):
    (run / CONFIG).write_text("{")
    assert any("config.json is damaged" in note for note in load(run).notes)


def test_a_run_without_its_last_checkpoint_does_not_begin_anew(tmp_path, quick):
    train(quick, tmp_path / "run", tensorboard=False)
    (tmp_path / "run" / LAST).unlink()
    facts_with(tmp_path / "run" / BEST, lambda facts: facts.update(epoch=2))
    best = (tmp_path / "run" / BEST).read_bytes()
    with pytest.raises(Damaged, match=r"last\.safetensors is missing, though 2 epochs are recorded\. Restore it"):
        resume(tmp_path / "run", quick)
    assert (tmp_path / "run" / BEST).read_bytes() == best
    (tmp_path / "run" / BEST).unlink()
    said: list[str] = []
    resume(tmp_path / "run", quick, say=said.append)
    assert said == [f"{tmp_path / 'run'} has no checkpoint to go on from, and begins anew."]


def test_what_is_refused_has_changed_nothing(run, quick):
    """A longer run is written down, and told, only once every part of the folder was read."""
    before, said = (run / CONFIG).read_bytes(), []
    (run / METRICS).unlink()
    with pytest.raises(Damaged, match=r"metrics\.jsonl is damaged"):
        resume(run, replace(quick, epochs=3), renewed=("lr", "attack"), say=said.append)
    assert (run / CONFIG).read_bytes() == before and not said


def test_no_flipped_bit_of_a_checkpoint_goes_unnoticed(tmp_path):
    """In the header as in the data: of dtypes, names, shapes, facts and sums."""
    path, rng = tmp_path / "a.safetensors", random.Random(0)
    tensors = {"model.a": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(9)}
    checkpoint.save(path, tensors, {"step": 9, "eps": 8 / 255, "text": "spaces  and é"})
    whole = path.read_bytes()
    sound = checkpoint.load(path)
    for _ in range(800):
        damaged = bytearray(whole)
        place = rng.randrange(len(whole))
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = checkpoint.load(path)
        except UserError as error:
            assert "\n" not in str(error)
            continue
        assert found.facts == sound.facts and found.tensors.keys() == sound.tensors.keys(), place
        assert all(torch.equal(found.tensors[key], tensors[key]) for key in tensors), place
        assert all(found.tensors[key].dtype == tensors[key].dtype for key in tensors), place


@pytest.mark.parametrize(("written", "changed"), [(b'"shape":[2,3]', b'"shape":[3,2]'), (b'"F32"', b'"I32"')])
def test_another_shape_or_kind_of_the_same_bytes_is_damage(tmp_path, written, changed):
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"a": torch.arange(6.0).reshape(2, 3)}, {})
    assert path.read_bytes().count(written) == 1
    path.write_bytes(path.read_bytes().replace(written, changed))
    with pytest.raises(Damaged, match="its tensors do not match their checksum"):
        checkpoint.load(path)


def test_facts_are_checked_without_the_tensors(tmp_path):
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"a": torch.zeros(3)}, {"step": 9})
    path.write_bytes(path.read_bytes().replace(b'\\"step\\": 9', b'\\"step\\": 8'))
    with pytest.raises(Damaged, match="what it records about itself does not match its checksum"):
        checkpoint.read_facts(path)


WRONG: list[Any] = [None, [], {}, "text", -1, 10**18, 0.5, True, [[[]]]]


def facts_with(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint records, and its sums with it: as a defective writer would."""
    found = checkpoint.load(path)
    facts = json.loads(json.dumps(found.facts))
    change(facts)
    checkpoint.save(path, found.tensors, facts)


def test_facts_of_every_wrong_kind_are_refused_at_the_door(run, quick):
    """Never another error, and never a run that goes on from them: the schema decides before anything is used."""
    sound, refused = (run / LAST).read_bytes(), 0
    names = list(checkpoint.read_facts(run / LAST))
    for name in names:
        changes: list[Callable[[dict[str, Any]], object]] = [lambda facts, name=name: facts.pop(name)]
        changes += [lambda facts, name=name, value=value: facts.update({name: value}) for value in WRONG]
        for change in changes:
            (run / LAST).write_bytes(sound)
            before = checkpoint.read_facts(run / LAST)
            facts_with(run / LAST, change)
            after = checkpoint.read_facts(run / LAST)
            if after == before:
                continue
            try:
                run_folder.open_run(run).last()
            except UserError as error:
                assert "\n" not in str(error)
                refused += 1
                continue
            # What is left are values of the right kind: another recipe or data set's name, a place in training.
            assert name in ("recipe", "data", "best", "history", "epoch", "step", "images", "seconds"), (name, after)
    assert refused > 60


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("channels", 10**18, "channels must be a whole number from 1 to 4096"),
        ("normalize", "text", "normalize must be a list"),
        ("normalize", [[0.5], ["x"]], "entry 2: entry 1: it must be a finite number"),
        ("size", [8, -8], "entry 2: it must be a whole number from 1"),
        ("num_classes", True, "num_classes must be a whole number"),
        ("name", 3, "name must be a text"),
        ("name", "wrn-60004-1", "wrn-60004-1"),
    ],
)
def test_a_description_of_the_wrong_kind_loads_no_model(run, field, value, wrong):
    facts_with(run / LAST, lambda facts: facts["model"].update({field: value}))
    with pytest.raises(UserError, match=wrong) as caught:
        load_model(run)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite(run, quick, caplog):
    found = checkpoint.load(run / LAST)
    for key, value in (("model.conv1.weight", torch.nan), ("optimizer.momentum_buffer.conv1.weight", torch.inf)):
        tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
        tensors[key].view(-1)[:2] = value
        checkpoint.save(run / LAST, tensors, found.facts)
        with pytest.raises(Damaged, match=rf"not finite: {key} \(2 of \d+ values\)"):
            resume(run, quick)
    tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
    tensors["model.conv1.weight"].view(-1)[0] = torch.nan
    checkpoint.save(run / LAST, tensors, found.facts)
    with caplog.at_level(logging.WARNING, logger="sparring"):
        load_model(run)
    assert "not finite: conv1.weight (1 of " in caplog.text


@pytest.mark.parametrize("name", [CONFIG, METRICS, run_folder.ENVIRONMENT, LAST])
def test_a_read_error_advises_no_destruction(run, quick, monkeypatch, name):
    original = Path.open

    def fails(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name == name and "r" in mode:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return original(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(Unreadable, match=rf"cannot read .*{name}: Input/output error") as caught:
        resume(run, quick)
    for word in ("overwrite", "elete", "written", "damaged", "anew"):
        assert word not in str(caught.value)


def test_a_kill_before_the_first_rename_leaves_a_folder_that_can_be_used(tmp_path, quick):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".config.json.1234.tmp").write_text('{"recipe"')
    train(replace(quick, epochs=1), folder, tensorboard=False)
    assert not list(folder.glob(".*"))
    for name in (".thesis.tex.1234.tmp", ".config.json.tmp", "config.json.1234.tmp"):  # not ours
        other = tmp_path / name
        other.mkdir()
        (other / name).write_text("mine")
        with pytest.raises(UserError, match="is not a run folder"):
            train(quick, other, tensorboard=False)
        assert (other / name).read_text() == "mine"


@pytest.mark.parametrize("anew", [True, False])
def test_a_run_whose_folder_was_taken_away_stops(tmp_path, quick, anew):
    folder = tmp_path / "run"

    class Thief:
        """Moves the folder away after the first epoch, and puts another one there."""

        def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None: ...

        def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None: ...

        def epoch(self, record: dict[str, Any], *, best: bool) -> None:
            folder.rename(tmp_path / "gone")
            if anew:
                folder.mkdir()

        def end(self) -> None: ...

    with pytest.raises(RunFailed, match="was replaced while this run" if anew else "was removed while this run"):
        train(replace(quick, epochs=3), folder, tensorboard=False, tracker=Thief())
    assert not anew or not list(folder.iterdir())
    assert len(run_folder.read_metrics(tmp_path / "gone")) == 1


def test_a_longer_run_belongs_to_its_own_checkpoints(run, quick):
    """Its configuration is written anew before its next checkpoint is: a kill between the two loses nothing."""
    longer = replace(quick, epochs=3)
    begun = run_folder.open_run(run)
    with pytest.raises(Interrupted):
        resume(run, longer, renewed=("lr", "attack"), stop=lambda: True)
    once = run_folder.open_run(run)
    assert once.before == (begun.digest,) and once.digest != begun.digest
    assert checkpoint.read_facts(run / LAST)["config"] == once.digest
    facts_with(run / LAST, lambda facts: facts.update(config=begun.digest))  # as if killed before it
    resume(run, longer)
    assert checkpoint.read_facts(run / LAST)["config"] == once.digest
    assert run_folder.open_run(run).before == (begun.digest,)
    assert [record["epoch"] for record in run_folder.whole_history(run)] == [1, 2, 3]


def test_a_doctored_run_goes_on(run, quick):
    """The tests' own helper keeps the parts of a run together; without it the tests above would test nothing."""
    doctor(run, lambda content: content["config"].update(weight_decay=2e-3))
    resume(run, replace(quick, weight_decay=2e-3))
