"""Networks of the user's own on the command line: named by import path, never by a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import sparring as library
from sparring import models
from sparring.cli.arguments import name_model
from sparring.models import own
from sparring.training import run_folder
from tests.training.test_loop import same_run

from .conftest import QUICK

CODE = """
from pathlib import Path

import torch

Path("imported").touch()


def make(num_classes, channels):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, num_classes)
    )


def other(num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))


def broken():
    raise KeyError("width")


net = other(10)
"""


@pytest.fixture
def module(monkeypatch, tmp_path, request):
    """The name of a module in the current folder that touches a file when it is imported; forgotten afterwards."""
    monkeypatch.setattr(own, "MADE", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"my_net_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    yield name
    sys.modules.pop(name, None)


def forget(module: str) -> None:
    """As in another process."""
    own.MADE.clear()
    sys.modules.pop(module, None)
    Path("imported").unlink(missing_ok=True)


def test_from_training_to_export(sparring, module):
    named = ["--model", f"{module}:make"]
    result = sparring("train", *QUICK, *named, "--out", "run")
    assert result.code == 0, result.err
    assert f"sparring evaluate run --model {module}:make" in result.out
    assert run_folder.open_run(Path("run")).config.model == f"{module}:make"
    for words in (
        ["evaluate", "run", "--limit", "20", "--no-doubts"],
        ["export", "run", "--out", "export"],
        ["train", "--out", "run", "--resume", "--epochs", "3", "--lr", "0.05", "--attack.tau", "0"],
        ["report", "run"],
    ):
        forget(module)
        result = sparring(*words)
        if words[0] == "report":  # the page is written, without an attack
            assert result.code == 0
            assert f"by itself. Name it again: --model {module}:make" in Path("report.html").read_text()
        else:
            result.user_error("no path from a file is followed", f"--model {module}:make")
        assert not Path("imported").exists()
        result = sparring(*words, *named)
        assert result.code == 0, result.err
        assert Path("imported").exists()
    forget(module)
    finished = sparring("train", "--out", "run", "--resume")
    finished.user_error("no path from a file is followed")
    assert not finished.out
    for attempt in (
        lambda: library.load_model("run"),
        lambda: library.train(out="run", resume=True),
        lambda: library.train(run_folder.open_run(Path("run")).config, out="copy"),
        lambda: library.train("fat-digits", out="copy", model=run_folder.open_run(Path("run")).config.model),
    ):
        with pytest.raises(library.UserError, match="no path from a file is followed"):
            attempt()
    assert not Path("imported").exists()
    model = library.load_model("export/run-last.safetensors", model=f"{module}:make")
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_weights_alone_are_predicted_with_and_exported_for_a_data_set(sparring, module, tmp_path):
    """The file says nothing of classes, channels and size: --data does, and the messages name it."""
    kept = library.data.load("digits").test.x[0, 0].numpy()
    Image.fromarray(kept).save(tmp_path / "digit.png")
    code = "\n\ndef fixed():\n    return make(10, 1)\n"
    (tmp_path / f"{module}.py").write_text(CODE + code)
    name_model(f"{module}:make")
    net = models.build(f"{module}:make", num_classes=10, channels=1).eval()
    torch.save(net.state_dict(), "own.pth")
    for make, says in (("make", "asks for num_classes"), ("fixed", "does not record num_classes, channels, size")):
        named = ["--model", f"{module}:{make}"]
        for words in (["predict", "own.pth", "digit.png"], ["export", "own.pth", "--format", "hub", "--out", "hub"]):
            sparring(*words, *named).user_error(says, "--data digits")
        said = sparring("predict", "own.pth", "digit.png", *named, "--data", "digits", "--json")
        assert said.code == 0, said.err
        found = json.loads(said.out)["images"][0]["class"]
        assert found == str(int(net(torch.from_numpy(kept)[None, None] / 255).argmax()))
        for form in ("pt2", "hub"):
            said = sparring(
                "export", "own.pth", *named, "--format", form, "--out", f"{make}.{form}", "--data", "digits"
            )
            assert said.code == 0, said.err
        program = torch.export.load(f"{make}.pt2").module()
        assert program(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert sparring("export", "own.pth", *named, "--out", "weights").code == 0
    again = ["weights/own.safetensors", "digit.png", *named]
    sparring("predict", *again).user_error("does not record num_classes, channels, size", "--data digits")
    assert sparring("predict", *again, "--data", "digits").code == 0
    sparring("export", "fat-digits", "--data", "digits").user_error("Leave out --data digits")


def test_resuming_is_exact(sparring, module):
    named = ["--model", f"{module}:make"]
    words = ["train", *QUICK, *named, "--lr", "0.05", "--attack.tau", "1"]
    assert sparring(*words, "--epochs", "3", "--out", "a").code == 0
    assert sparring(*words, "--epochs", "1", "--out", "b").code == 0
    forget(module)
    result = sparring("train", "--out", "b", "--resume", "--epochs", "3", *named)
    assert result.code == 0 and "note: b goes on after 1 epoch: epochs 1 -> 3." in result.out
    same_run(Path("a"), Path("b"))
    assert json.loads(Path("b/config.json").read_text())["earlier"] == [{"epochs": 1, "trained": 1}]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("{}:makes", ["has no 'makes'", "Did you mean 'make'?"]),
        ("{}:net", ["is a Sequential. Name a function or class"]),
        ("{}:broken", ["making the model", "KeyError: 'width'"]),
        ("no_such_module:make", ["cannot import 'no_such_module'", "the current folder counts"]),
        ("{}.py:make", ["package.module:make, without .py"]),
        ("resnet19", ["unknown model 'resnet19'", "Did you mean 'resnet18'?", "--model package.module:make"]),
        ("own:Net", ["handed in from Python (Net)"]),
    ],
)
def test_names_that_do_not_make_a_network(sparring, module, named, expected):
    sparring("train", *QUICK, "--model", named.format(module), "--out", "run").user_error(*expected)
    assert not Path("run").exists()


def test_images_that_were_handed_in_have_no_place(sparring, module):
    """One fix is told, not also the one for images that have moved."""
    x, y = torch.rand(60, 1, 8, 8), torch.arange(60) % 10
    how = {"epochs": 1, "validation": 10, "progress": False, "device": "cpu"}
    library.train(library.Config(model="tiny_cnn"), "run", data=(x, y), **how)
    for words in (["evaluate", "run"], ["train", "--out", "run", "--resume", "--epochs", "2"]):
        said = sparring(*words)
        said.user_error("(own:tensors) were handed in from Python", "or name a source: --data.")
        assert "moved" not in said.err


def test_another_network_is_refused_by_its_keys(sparring, module):
    assert sparring("train", *QUICK, "--epochs", "1", "--model", f"{module}:make", "--out", "run").code == 0
    wrong = ["--model", f"{module}:other"]
    sparring("evaluate", "run", *wrong).user_error("does not hold the weights of Sequential", "unexpected: 0.bias")
    sparring("train", "--out", "run", "--resume", *wrong).user_error("another network than Sequential", "unexpected")
    assert run_folder.open_run(Path("run")).config.model == f"{module}:make"
    sparring("evaluate", "run", "--model", "resnet18").user_error("does not fit 'resnet18'")


def test_a_module_in_the_current_folder_is_found_by_the_console_script(module, tmp_path, monkeypatch):
    """The script's own folder is first on its path, not the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    name_model(f"{module}:make")
    assert models.build(f"{module}:make", num_classes=3, channels=1)[-1].out_features == 3
