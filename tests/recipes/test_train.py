"""`sparring.train` from Python, and what `import sparring` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import sparring
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


def test_train_takes_a_config(tmp_path):
    config = sparring.Config(objective=sparring.Standard(), epochs=1, batch_size=256, validation=120)
    assert not sparring.train(config, tmp_path / "run").training
    assert run_folder.open_run(tmp_path / "run").config == config


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("fat-digit", {}, "Did you mean 'fat-digits'"),
        (3, {}, "a recipe's name or a Config, got 3"),
        ("fat-digits", {"epoch": 3}, "Config has no 'epoch'. It has: .*epochs"),
        ("fat-digits", {"eps": 0.1}, "Config has no 'eps'"),
        ("fat-digits", {"device": "banana"}, "unknown device 'banana'"),
        ("fat-digits", {"engine": "slow"}, "unknown engine 'slow'"),
        ("fat-digits", {"model": torch.nn.Linear(2, 2)}, "model must be a name, got Linear"),
        ("fat-digits", {"augment": "rotate"}, "unknown augmentation 'rotate'"),
    ],
)
def test_wrong_input_is_a_user_error(tmp_path, recipe, changes, message):
    with pytest.raises(sparring.UserError, match=message):
        sparring.train(recipe, out=tmp_path / "run", **changes)


def test_public_names_are_documented():
    for name in sparring.__all__:
        value = getattr(sparring, name)
        assert name == "__version__" or value.__doc__, name
    assert not hasattr(sparring, "trian")


def test_import_does_not_load_torch():
    code = "import sys, sparring; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
