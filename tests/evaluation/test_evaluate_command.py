from __future__ import annotations

import json

import pytest
import torch

from sparring.cli.evaluate import run
from sparring.errors import UserError
from sparring.evaluation import Result
from sparring.training import checkpoint

FACTS = {"name": "tiny_cnn", "num_classes": 10, "channels": 1, "size": [8, 8], "normalize": None}


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A run folder with the trained model as its last checkpoint."""
    monkeypatch.chdir(tmp_path)
    tensors = {f"model.{name}": tensor for name, tensor in trained.model.state_dict().items()}
    checkpoint.save(tmp_path / "last.safetensors", tensors, {"model": FACTS, "data": "digits", "epoch": 1})
    return tmp_path


def words(folder, *more):
    return [str(folder), "--protocol", "quick", "--limit", "40", "--no-doubts", "--device", "cpu", *more]


def test_a_run_folder(folder, capsys):
    assert run(words(folder, "--eps", "8/255", "--json", "mine.json")) == 0
    printed = capsys.readouterr().out
    assert "natural" in printed and "pgd10" in printed and "worst" in printed
    written = folder / "evaluation" / f"quick-eps{8 / 255!r}-limit40.json"
    result = Result.from_json(written.read_text())
    assert (folder / "mine.json").read_text() == written.read_text()
    assert result.n == 40 and result["pgd10"].eps == 8 / 255
    assert result.about["data"] == "digits" and result.about["model"] == str(folder)
    assert list((folder / "evaluation" / "verdicts").glob("*/pgd10-*.npz"))


def test_a_file_and_several_protocols(folder):
    file = folder / "last.safetensors"
    given = ["--protocol", "quick", "mart", "--seeds", "2", "--eps", "0.1", "--out", "o", "--restarts", "2"]
    assert run([str(file), *given, "--limit", "20", "--no-doubts", "--device", "cpu", "--precision", "bf16"]) == 0
    (written,) = (folder / "o").glob("*.json")
    assert written.name == "quick+mart-eps0.1-limit20-seeds2-restarts2-bf16.json"
    records = json.loads(written.read_text())["records"]
    assert [record["name"] for record in records] == ["natural", "pgd10", "fgsm", "pgd20", "cw30", "worst"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--protocol", "trade"], "unknown protocol 'trade'. Did you mean 'trades'?"),
        (["--limit", "0"], "limit must be at least 1 image"),
        (["--eps", "8"], "For 8/255 write 8/255"),
        (["--mean", "0.5"], "--mean and --std go together"),
        (["--data", "nowhere"], "unknown data source"),
        (["--data", "npz:colour.npz"], "was made for 1 colour channels, "),
        (["--data", "npz:few.npz"], "was made for 10 classes, "),
        (["--data", "npz:large.npz"], "does not accept images of shape (1, 12, 12)"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--precision", "fp8"], "invalid choice 'fp8' for argument '--precision'. Expected one of ('fp32', 'bf16')"),
    ],
)
def test_user_errors_are_one_line(folder, more, says):
    import numpy as np

    for name, shape, classes in (("colour", (8, 8, 3), 10), ("few", (8, 8, 1), 3), ("large", (12, 12, 1), 10)):
        x, y = np.zeros((20, *shape), np.uint8), np.arange(20) % classes
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(UserError) as refused:
        run(words(folder, *more))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_missing_and_foreign_files(folder):
    with pytest.raises(UserError, match="there is no checkpoint"):
        run(words(folder / "none"))
    (folder / "text.pth").write_text("hello")
    with pytest.raises(UserError):
        run(words(folder / "text.pth"))


def test_a_file_without_its_data_set_needs_data(folder, trained):
    torch.save(trained.model.state_dict(), folder / "plain.pt")
    with pytest.raises(UserError, match="Give it: --data cifar10"):
        run(words(folder / "plain.pt", "--model", "tiny_cnn"))
    assert run(words(folder / "plain.pt", "--model", "tiny_cnn", "--data", "digits")) == 0
    assert list((folder / "evaluation" / "plain").glob("quick*.json"))


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as left:
        run(["--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "sparring evaluate runs/" in printed and "trades-random" in printed


def test_a_result_is_named_by_the_precision_that_it_has(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "in_float64.py").write_text(
        "from sparring import models\n\n\n"
        "def net(): return models.build('tiny_cnn', num_classes=10, channels=1, size=(8, 8)).double()\n"
    )
    assert run(words(folder, "--precision", "bf16", "--model", "in_float64:net")) == 0
    (written,) = (folder / "evaluation").glob("*.json")
    assert written.name == "quick-limit40.json"
    assert {record["precision"] for record in json.loads(written.read_text())["records"]} == {"fp64"}
