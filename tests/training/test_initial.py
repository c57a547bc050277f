"""Fine-tuning: weights of a run or a file to begin from, and a run that is made longer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

import sparring
from sparring import models, weights
from sparring.data import load
from sparring.errors import UserError
from sparring.objectives import FAT
from sparring.schedules import parse
from sparring.training import checkpoint, loop, run_folder
from sparring.training.config import Config, with_objective
from sparring.training.initial import Initial, begin_from
from sparring.training.lengthen import same_but_for_length
from sparring.training.loop import Interrupted
from tests.own_networks import Net
from tests.training.test_loop import same_run

ZERO = {"lr": parse("1e-30"), "weight_decay": 0.0}  # no step to speak of


@pytest.fixture
def quick(small):
    return with_objective(replace(small, epochs=1, augment="none", validation=70), steps=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small):
    """A run of one epoch; tests must not write to it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    loop.train(replace(small, epochs=1), folder, tensorboard=False)
    return folder


def begun(config, folder, **how):
    return loop.train(config, folder, initial=weights.initial, tensorboard=False, **how)


def parameters(folder, net=None):
    return dict(weights.load_model(folder, model=net).named_parameters())


@pytest.mark.parametrize("kind", ["run", "safetensors", "pt"])
def test_a_run_begins_from_weights(tmp_path, trained, quick, kind):
    source = trained
    if kind != "run":
        written = weights.export(trained, tmp_path / "export")
        source = written.safetensors if kind == "safetensors" else written.state_dict
    begun(replace(quick, **ZERO, init=str(source)), tmp_path / "run")
    ours, theirs = parameters(tmp_path / "run"), parameters(trained)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-12) for name in theirs)
    run = run_folder.open_run(tmp_path / "run")
    assert run.config.init == str(source) and len(run.init) == 64


def test_the_resumed_run_needs_the_file_no_more(tmp_path, trained, quick):
    shutil.copytree(trained, tmp_path / "source")
    config = replace(quick, epochs=2, init=str(tmp_path / "source"))
    begun(config, tmp_path / "whole")
    steps = iter(range(100))
    with pytest.raises(Interrupted):
        begun(config, tmp_path / "parts", stop=lambda: next(steps) == 2)
    shutil.move(tmp_path / "source", tmp_path / "moved")
    begun(config, tmp_path / "parts", resume=True)
    same_run(tmp_path / "whole", tmp_path / "parts")
    begun(replace(config, init=str(tmp_path / "moved")), tmp_path / "parts", resume=True)  # the same weights elsewhere
    assert run_folder.open_run(tmp_path / "parts").config.init == str(tmp_path / "moved")
    with pytest.raises(UserError, match=r"are not those that .* began from"):
        begun(replace(config, init=str(tmp_path / "whole")), tmp_path / "parts", resume=True)
    with pytest.raises(UserError, match=r"init .*moved -> "):
        begun(replace(config, init=""), tmp_path / "parts", resume=True)


def test_a_head_of_another_class_count_is_replaced(trained):
    model = models.build("tiny_cnn", num_classes=3, channels=1, size=(8, 8))
    head, source = model.fc.weight.detach().clone(), parameters(trained)
    note = begin_from(weights.initial(trained), model, 3)
    assert note == f"begins from {trained} with a new head (fc.weight, fc.bias: 10 -> 3 classes)."
    assert torch.equal(model.fc.weight, head) and torch.equal(model.conv1.weight, source["conv1.weight"])
    for size, channels in (((8, 8), 3), ((16, 16), 1)):
        other = models.build("tiny_cnn", num_classes=10, channels=channels, size=size)
        with pytest.raises(UserError, match=r"not those of TinyCNN\. misshaped: "):
            begin_from(weights.initial(trained), other, 10)
    with pytest.raises(UserError, match=r"not those of Net\. missing: conv.weight.*unexpected: "):
        begin_from(weights.initial(trained), Net(), 10)


def test_a_new_head_is_said(tmp_path, trained, quick):
    data, said = load("digits"), []
    few = replace(data, classes=data.classes[:3], train=data.train.take((data.train.y < 3).nonzero()[:, 0]))
    begun(replace(quick, init=str(trained), batch_size=64, validation=30), tmp_path / "run", data=few, say=said.append)
    assert len(said) == 1 and "10 -> 3 classes" in said[0]
    assert weights.load_model(tmp_path / "run").fc.out_features == 3


def test_normalisation_comes_with_the_weights(tmp_path, trained, quick):
    begun(replace(quick, normalize=True), tmp_path / "a")
    with pytest.raises(UserError, match=r"normalises its images. Add --normalize"):
        begun(replace(quick, init=str(tmp_path / "a")), tmp_path / "b")
    with pytest.raises(UserError, match=r"does not normalise its images. Leave out --normalize"):
        begun(replace(quick, normalize=True, init=str(trained)), tmp_path / "b")
    assert not (tmp_path / "b").exists()
    begun(replace(quick, normalize=True, init=str(tmp_path / "a")), tmp_path / "b")
    facts = [checkpoint.read_facts(tmp_path / name / run_folder.LAST)["model"]["normalize"] for name in "ab"]
    assert torch.allclose(torch.tensor(facts[0]), torch.tensor(facts[1]))


def test_own_networks_begin_from_their_own_runs(tmp_path, quick):
    begun(quick, tmp_path / "a", model=Net())
    begun(replace(quick, **ZERO, init=str(tmp_path / "a")), tmp_path / "b", model=Net())
    ours, theirs = parameters(tmp_path / "b", Net()), parameters(tmp_path / "a", Net())
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-12) for name in theirs)


def test_wrong_sources_are_refused(tmp_path, quick, trained):
    for given in (3, {"a": torch.zeros(1)}, Net()):
        with pytest.raises(UserError, match="init must be the path of a run or a file, got"):
            sparring.train("fat-digits", out=tmp_path / "run", init=given)
        with pytest.raises(UserError, match="init must be a text, the path"):
            replace(quick, init=given)
    with pytest.raises(UserError, match=r"there is no checkpoint at .*runn. Did you mean 'run'"):
        begun(replace(quick, init=str(trained.parent / "runn")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_digest_tells_weights_apart():
    one, two = Initial("a", ({"w": torch.zeros(2)},)), Initial("b", ({"w": torch.ones(2)},))
    assert one.digest == Initial("c", ({"w": torch.zeros(2)},)).digest != two.digest


STEADY = {"lr": parse("0.05,0.01@3"), "objective": sparring.FAT(eps=0.1, step_size=0.05, steps=2, tau="0,1@2")}


def test_a_longer_run_is_the_run_that_was_long_from_the_start(tmp_path, quick):
    """Finished or not; schedules that are constant or start at epochs do not change the past."""
    steady, said = replace(quick, **STEADY), []
    loop.train(replace(steady, epochs=4), tmp_path / "long", tensorboard=False)
    loop.train(replace(steady, epochs=2), tmp_path / "run", tensorboard=False)
    longer = replace(steady, epochs=4)
    loop.train(longer, tmp_path / "run", resume=True, tensorboard=False, say=said.append)
    same_run(tmp_path / "long", tmp_path / "run")
    assert said == [f"{tmp_path / 'run'} goes on after 2 epochs: epochs 2 -> 4."]
    run = run_folder.open_run(tmp_path / "run")
    assert run.config == longer and run.earlier == ({"epochs": 2, "trained": 2},)
    with pytest.raises(UserError, match=r"has trained 4 epochs, --epochs 3 is fewer"):
        loop.train(replace(steady, epochs=3), tmp_path / "run", resume=True, tensorboard=False)
    assert run_folder.open_run(tmp_path / "run") == run


def test_schedules_that_follow_the_length_must_be_given_anew(tmp_path, quick):
    fat = sparring.FAT(eps=0.1, step_size=0.05, steps=2, tau="0,1@50%")
    config = replace(quick, epochs=2, lr=parse("one-cycle:0.1"), objective=fat)
    loop.train(config, tmp_path / "run", tensorboard=False)
    again = {"resume": True, "tensorboard": False}
    before = (tmp_path / "run" / run_folder.CONFIG).read_text()
    with pytest.raises(UserError, match=r"--lr one-cycle:0.1@40% follows the length .* first 2 would .*--lr \.\.\."):
        loop.train(replace(config, epochs=4), tmp_path / "run", **again)
    with pytest.raises(UserError, match=r"--attack.tau 0,1@50% follows the length"):
        loop.train(replace(config, epochs=4, lr=parse("0.01")), tmp_path / "run", **again)
    with pytest.raises(UserError, match=r"another configuration \(lr one-cycle:0.1@40% -> 0.01\)"):
        loop.train(replace(config, lr=parse("0.01")), tmp_path / "run", **again)
    with pytest.raises(UserError, match=r"another configuration \(epochs 2 -> 4; seed 0 -> 2\)"):
        loop.train(replace(config, epochs=4, seed=2), tmp_path / "run", **again)
    assert (tmp_path / "run" / run_folder.CONFIG).read_text() == before
    said = []
    longer = replace(config, epochs=3, lr=parse("0.01"))
    loop.train(longer, tmp_path / "run", renewed={"attack.tau"}, say=said.append, **again)
    assert said == [f"{tmp_path / 'run'} goes on after 2 epochs: epochs 2 -> 3; lr one-cycle:0.1@40% -> 0.01."]
    records = run_folder.read_metrics(tmp_path / "run")
    assert [record["epoch"] for record in records] == [1, 2, 3] and records[-1]["lr"] == 0.01
    written = json.loads((tmp_path / "run" / run_folder.CONFIG).read_text())
    assert written["earlier"] == [{"epochs": 2, "trained": 2, "lr": "one-cycle:0.1@40%"}]


def test_a_schedule_whose_past_stays_is_kept(tmp_path, quick):
    """1 of 4 epochs done: half of 4 and half of 8 both lie ahead."""
    fat = sparring.FAT(eps=0.1, step_size=0.05, steps=2, tau="0,1@50%")
    config, steps = replace(quick, epochs=4, lr=parse("0.05"), objective=fat), iter(range(100))
    with pytest.raises(Interrupted):
        loop.train(config, tmp_path / "run", tensorboard=False, stop=lambda: next(steps) == 4)
    loop.train(replace(config, epochs=5), tmp_path / "run", resume=True, tensorboard=False)
    assert [record["tau"] for record in run_folder.read_metrics(tmp_path / "run")] == [0, 0, 1, 1, 1]


def test_from_python_without_a_recipe(tmp_path):
    out, settings = tmp_path / "run", {"epochs": 1, "batch_size": 256, "lr": 0.05, "validation": 120, "device": "cpu"}
    fat = sparring.FAT(eps=0.1, step_size=0.05, steps=2)
    sparring.train(objective=fat, model=Net(), out=str(out), **settings)
    assert run_folder.open_run(out).config == sparring.Config(
        objective=fat, model="own:Net", **{name: value for name, value in settings.items() if name != "device"}
    )
    with pytest.raises(UserError, match=r"handed in from Python \(Net\)"):
        sparring.train(out=out, resume=True, epochs=2)
    model = sparring.train(out=out, resume=True, epochs=2, model=Net(), device="cpu")
    run = run_folder.open_run(out)
    assert run.config.epochs == 2 and len(run_folder.read_metrics(out)) == 2 and not model.training
    with pytest.raises(UserError, match="out must be the path of the run folder, got None"):
        sparring.train(objective=fat)
    with pytest.raises(UserError, match=r"model must be an nn.Module, what makes one, or a name, got int"):
        sparring.train("fat-digits", out=out, model=3)


def test_a_part_of_eps_and_its_number_are_one_run_that_can_be_made_longer():
    parts = Config(objective=FAT(eps=0.3, step_size="eps/4"), epochs=2, validation_eps="eps")
    numbers = replace(parts, objective=FAT(eps=0.3, step_size=0.3 / 4), epochs=1, validation_eps=0.3)
    assert same_but_for_length(numbers, parts)
    assert not same_but_for_length(replace(numbers, batch_size=7), parts)
