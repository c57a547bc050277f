"""A folder for a model hub: read here, by huggingface_hub's mixin, and by people."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparring import models, weights
from sparring.errors import UserError
from sparring.files.digests import sealed
from sparring.training import checkpoint
from sparring.weights import load_model
from sparring.weights.model_card import model_card

from .conftest import TINY, described, same, stirred

CLASSES = [f"digit {i}" for i in range(10)]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return stirred(models.build("tiny_cnn", **TINY, normalize=([0.3], [0.2])))


@pytest.fixture
def run(tmp_path: Path, model: nn.Module) -> Path:
    """A run folder with evaluations."""
    folder = tmp_path / "a run"
    (folder / "evaluation").mkdir(parents=True)
    config = {"objective": "fat", "attack": {"eps": 0.3, "step_size": 0.1, "steps": 10, "tau": "1"}}
    written = sealed({"recipe": "fat-digits", "sparring": "0.x", "config": config})
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    network = {**described("tiny_cnn", **TINY, normalize=[[0.3], [0.2]]), "classes": CLASSES}
    facts = {"model": network, "data": "folder:/home/me/secret/photos", "epoch": 3, "recipe": "fat-digits"}
    facts["config"] = written["sha256"]
    checkpoint.save(folder / "last.safetensors", tensors, facts)
    return folder


def evaluation(*records: dict[str, Any], which: str = "last", epoch: int = 3, doubts: tuple[str, ...] = ()) -> str:
    """The JSON of an evaluation."""
    about = {"which": which, "facts": {"epoch": epoch}, "data": "digits", "command": "sparring evaluate MODEL"}
    software = {"device": "a device", "torch": "2.x", "sparring": "0.x"}
    raised = [{"name": name, "why": "", "evidence": ""} for name in doubts]
    found = {"n": 450, "about": about, "software": software, "doubts": raised}
    return json.dumps({**found, "records": list(records)})


def record(name: str, accuracy: float, **changes: Any) -> dict[str, Any]:
    settings = {"n": 450, "eps": 0.3, "steps": 20, "step_size": 0.03, "loss": "ce", "start": "uniform", "restarts": 1}
    right = round(450 * accuracy)
    runs = [{"seed": 0, "accuracy": right / 450, "seconds": 1.0, "correct": "1" * right + "0" * (450 - right)}]
    more = {"precision": "fp32", "spread": None, "detail": {}, "serves": [f"{name}@mart"], "runs": runs, "seconds": 1.0}
    return {"name": name, "accuracy": right / 450, **settings, **more, **changes}


def test_the_folder_loads_here_and_by_the_mixin(tmp_path: Path, run: Path, model: nn.Module) -> None:
    pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub")
    from sparring.weights.hub import HubModel

    x = torch.rand(3, 1, 8, 8)
    made = weights.export(run, tmp_path / "hub", format="hub")
    assert sorted(file.name for file in made.files) == ["README.md", "config.json", "model.safetensors"]
    loaded = load_model(tmp_path / "hub")
    same(loaded, model, x)
    assert loaded.classes == tuple(CLASSES)
    by_mixin = HubModel.from_pretrained(tmp_path / "hub", local_files_only=True).eval()
    same(by_mixin, model, x)
    assert by_mixin.classes == tuple(CLASSES) and by_mixin.threat == {"norm": "linf", "eps": 0.3}
    # What the mixin writes, after training on for example, is read here too.
    by_mixin.save_pretrained(tmp_path / "again")
    same(load_model(tmp_path / "again"), model, x)
    assert load_model(tmp_path / "again").classes == tuple(CLASSES)
    same(HubModel.from_pretrained(tmp_path / "again").eval(), model, x)


def test_a_config_of_another_library_is_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub")
    from sparring.weights.hub import HubModel

    with pytest.raises(UserError, match="its model has no 'num_classes'"):
        HubModel(model={"name": "tiny_cnn"})
    with pytest.raises(UserError, match="unknown model 'bert'"):
        HubModel(model={"name": "bert", "num_classes": 2})


def test_without_huggingface_hub_the_class_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "sparring.weights.hub", raising=False)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        importlib.import_module("sparring.weights.hub")


def test_the_card_has_what_was_measured_autoattack_first(tmp_path: Path, run: Path) -> None:
    natural = record("natural", 0.96, eps=0.0, steps=0, step_size=0.0, loss="", start=None, serves=[])
    (run / "evaluation" / "mart.json").write_text(evaluation(natural, record("pgd20", 0.5644), doubts=("few-steps",)))
    (run / "evaluation" / "autoattack.json").write_text(evaluation(natural, record("autoattack", 0.3444)))
    (run / "evaluation" / "old.json").write_text(evaluation(record("pgd20", 0.9), epoch=2))
    (run / "evaluation" / "best.json").write_text(evaluation(record("pgd20", 0.8), which="best"))
    (run / "evaluation" / "bound-x.json").write_text("{}")
    (run / "evaluation" / "damaged.json").write_text("{")
    made = weights.export(run, tmp_path / "hub", format="hub")
    assert [note.partition(":")[0] for note in made.notes] == ["left out damaged.json", "left out old.json"]
    measured = json.loads((tmp_path / "hub" / "config.json").read_text())["measured"]
    assert [each["attack"] for each in measured] == ["autoattack", "natural", "pgd20"]
    card = (tmp_path / "hub" / "README.md").read_text()
    rows = [line for line in card.splitlines() if line.startswith("| ") and "attack | acc" not in line]
    assert rows[0].startswith("| autoattack | 34.44 % | 450 | Linf 0.3 |")
    assert rows[2] == "| pgd20 | 56.44 % | 450 | Linf 0.3 | 20 steps of 0.03, ce, uniform | mart | digits |"
    assert "sparring evaluate MODEL" in card and "a device, torch 2.x" in card and "few-steps" in card
    assert "- AutoAttack." not in card and "secret" not in card + (tmp_path / "hub" / "config.json").read_text()
    yaml = pytest.importorskip("yaml")
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "sparring"
    assert front["model-index"][0]["results"][0]["metrics"][0]["value"] == 34.44


def test_the_card_says_what_was_not_measured(run: Path, tmp_path: Path) -> None:
    weights.export(run, tmp_path / "hub", format="hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "Nothing: no evaluation" in card and "- AutoAttack." in card and "- Any accuracy under attack." in card
    assert "model-index" not in card
    elsewhere = {"attack": "pgd20", **record("pgd20", 0.5, eps=0.1), "norm": "linf", "over": None, "protocols": []}
    elsewhere |= {"data": "digits", "device": "d", "torch": "t", "sparring": "s", "command": None, "doubts": []}
    facts = {**weights.facts(tmp_path / "hub"), "measured": [elsewhere]}
    assert "The threat it was trained for (Linf 0.3)." in model_card("x", facts)


def test_a_folder_with_other_files_is_not_written_to(run: Path, tmp_path: Path) -> None:
    before = (run / "config.json").read_text()
    with pytest.raises(UserError, match="holds other files"):
        weights.export(run, run, format="hub")
    assert (run / "config.json").read_text() == before
    weights.export(run, tmp_path / "hub", format="hub")
    weights.export(run, tmp_path / "hub", format="hub")  # its own files may be replaced
    with pytest.raises(UserError, match="would overwrite"):
        weights.export(tmp_path / "hub", tmp_path / "hub", format="hub")
    assert weights.export(tmp_path / "hub", tmp_path / "out").safetensors.name == "hub.safetensors"


def test_the_card_of_a_network_of_ones_own_says_to_bring_it() -> None:
    own = {"name": "own:Net", "num_classes": 3, "channels": 1, "size": [8, 8]}
    card = model_card("mine", {"model": own})
    assert 'load_model("PATH/TO/THIS/FOLDER", model=net)' in card and "HubModel" not in card
    assert "HubModel" in model_card("ours", {"model": own | {"name": "tiny_cnn"}})


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_program_is_not_read_back(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"model.{suffix}").write_bytes(b"\x08\x0a" * 300)
    with pytest.raises(UserError, match="is a program for other runtimes"):
        load_model(tmp_path / f"model.{suffix}")
