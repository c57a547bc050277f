"""`sparring.train` from Python, and what `import sparring` offers."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import pytest
import torch

import sparring
from sparring.data import load
from sparring.training import run_folder

QUICK = {"epochs": 1, "batch_size": 256, "device": "cpu"}


def test_recipe_by_name_with_changes(tmp_path):
    fat = sparring.FAT(eps=0.1, step_size=0.05, steps=2, tau=1)
    model = sparring.train("fat-digits", out=tmp_path / "run", objective=fat, seed=3, **QUICK)
    run = run_folder.open_run(tmp_path / "run")
    assert (run.recipe, run.config.seed, run.config.objective) == ("fat-digits", 3, fat)
    again = sparring.load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    with pytest.raises(sparring.UserError, match="resume"):
        sparring.train("fat-digits", out=tmp_path / "run", **QUICK)


def test_progress_is_shown_unless_told_not_to(tmp_path, capsys):
    quick = {"objective": sparring.FAT(eps=0.1, step_size=0.1, steps=1), **QUICK}
    sparring.train("fat-digits", out=tmp_path / "shown", tracker="csv", **quick)
    said = capsys.readouterr()
    assert said.out == "" and [line.split()[0] for line in said.err.splitlines()] == ["engine:", "validation", "epoch"]
    assert (tmp_path / "shown" / run_folder.CSV).exists()
    sparring.train("fat-digits", out=tmp_path / "silent", progress=False, **quick)
    assert capsys.readouterr() == ("", "")


def test_train_takes_a_config(tmp_path):
    config = sparring.Config(objective=sparring.Standard(), epochs=1, batch_size=256, validation=120)
    assert not sparring.train(config, tmp_path / "run").training
    assert run_folder.open_run(tmp_path / "run").config == config


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("fat-digit", {}, "Did you mean 'fat-digits'"),
        (3, {}, "a recipe's name or a Config, got int. Write for example"),
        (None, {}, "nothing says what to train. Give a recipe, for example 'fat-digits'"),
        (None, {"resume": True}, r"run holds no run \(no config.json in it\). Check the path, or begin one"),
        (None, {"resume": True, "model": torch.nn.Flatten()}, r"holds no run \(no config.json in it\)"),
        ("fat-digits", {"resume": "yes"}, "resume must be True or False"),
        ("fat-digits", {"resume": True, "overwrite": True}, "Give one of them"),
        (sparring.FAT(), {}, "got FAT. Write objective=fat"),
        ("fat-digits", {"objective": sparring.FAT}, "got the class FAT. Write for example FAT"),
        ("fat-digits", {"objective": sparring.Config()}, "got Config. Write for example FAT"),
        ("fat-digits", {"model": 3}, "got int. Write for example model=net"),
        ("fat-digits", {"init": 3}, "init must be the path of a run or a file, got int"),
        ("fat-digits", {"epoch": 3}, "have no 'epoch'. Did you mean 'epochs'.*Config has: .*epochs"),
        ("fat-digits", {"eps": 0.1}, r"eps is a parameter of the objective. .* objective=FAT\(eps=0.1\)"),
        ("fat-digits", {"progress": "no"}, "progress must be True or False, got 'no'"),
        ("fat-digits", {"tensorboard": 1}, "tensorboard must be True or False, got 1"),
        ("fat-digits", {"device": "banana"}, "unknown device 'banana'"),
        ("fat-digits", {"engine": "slow"}, "unknown engine 'slow'"),
        (
            "fat-digits",
            {"model": torch.nn.Linear(2, 2)},
            r"the model \(Linear\) does not take images of shape \(1, 8, 8\)",
        ),
        ("fat-digits", {"tracker": "wand"}, "unknown tracker 'wand'. Did you mean 'wandb'"),
        ("fat-digits", {"augment": "rotate"}, "unknown augmentation 'rotate'"),
    ],
)
def test_wrong_input_is_a_user_error(tmp_path, recipe, changes, message):
    with pytest.raises(sparring.UserError, match=message) as caught:
        sparring.train(recipe, out=tmp_path / "run", **changes)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_resuming_where_there_is_no_run_begins_one_and_says_so(tmp_path, caplog):
    begin = partial(sparring.train, "fat-digits", tmp_path / "run", objective=sparring.Standard(), progress=False)
    begin(resume=True, **QUICK)
    assert caplog.messages == [f"{tmp_path / 'run'} held no run to resume: a new one begins."]
    begin(resume=True, **QUICK)
    assert len(caplog.messages) == 1


def test_resuming_a_misspelt_folder_is_an_error_where_nothing_says_what_to_train(tmp_path):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(sparring.UserError, match=r"holds no run .*Check the path"):
        sparring.train(out=tmp_path / "typo", model=network, resume=True)
    digits = load("digits")
    part = (digits.train.head(40).x, digits.train.head(40).y), (digits.test.head(9).x, digits.test.head(9).y)
    sparring.train(out=tmp_path / "new", model=network, data=part, resume=True, epochs=1, validation=8, batch_size=16)


def test_a_recipe_without_its_attack_keeps_the_radius_of_validation(tmp_path):
    sparring.train("fat-digits", tmp_path / "run", objective=sparring.Standard(), progress=False, **QUICK)
    assert run_folder.open_run(tmp_path / "run").config.validation_eps == 0.3


def test_public_names_are_documented():
    for name in sparring.__all__:
        value = getattr(sparring, name)
        assert name == "__version__" or value.__doc__, name
        assert name == "__version__" or re.search(rf"\b{name}\b", str(sparring.__doc__)), f"{name} is not in the help"
    assert not hasattr(sparring, "trian")
    assert str(sparring.__doc__).count("\n") < 60


def test_import_does_not_load_torch():
    code = "import sys, sparring; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
