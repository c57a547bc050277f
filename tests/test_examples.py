"""The examples run: scripts with fewer epochs where that is enough, the notebook cell by cell."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparring.cli import main
from sparring.cli.train import options_of

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def random_state() -> Iterator[None]:
    """Examples seed torch as a user's script does; other tests must not notice."""
    with torch.random.fork_rng(devices=[]):
        yield


def script(name: str) -> ModuleType:
    """An example as a module; its main is not run."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.[ipst]*"):
        assert path.stem in tested, f"no test of {path.name}"


def test_own_loop(capsys, monkeypatch) -> None:
    example = script("own_loop")
    monkeypatch.setattr(example, "EPOCHS", 3)
    example.main()
    rows = dict(re.findall(r"^(\w+) training\s+(.*) %$", capsys.readouterr().out, re.MULTILINE))
    natural, robust = ({name: float(row.split(" % ")[i]) for name, row in rows.items()} for i in (0, 1))
    assert min(natural.values()) > 80
    assert robust["friendly"] > robust["standard"] + 10


def test_own_network(tmp_path, monkeypatch) -> None:
    example = script("own_network")
    monkeypatch.setattr(example, "EPOCHS", 1)
    monkeypatch.setattr(example, "IMAGES", 50)
    result = example.main(tmp_path / "run")
    assert result["natural"].accuracy > 0.5 and result["natural"].n == 50
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["model"] == "own:MyNet"


def test_own_images(tmp_path, monkeypatch, capsys) -> None:
    example = script("own_images")
    monkeypatch.setattr(example, "EPOCHS", 1)
    monkeypatch.setattr(example, "EACH", 40)
    result = example.main(example.draw(tmp_path / "shapes"), tmp_path / "run")
    assert result["natural"].n == 24
    printed = capsys.readouterr().out
    assert "test images" in printed and "probability" in printed


def test_fine_tuning(tmp_path, monkeypatch, capsys) -> None:
    example = script("fine_tuning")
    monkeypatch.setattr(example, "EPOCHS", 1)
    monkeypatch.setattr(example, "IMAGES", 100)
    found = example.main(tmp_path)
    assert set(found) == {"first", "wider", "every", "longer"} and found["longer"] > found["every"]
    config = json.loads((tmp_path / "every" / "config.json").read_text())["config"]
    assert config["epochs"] == 2 and config["init"] == str(tmp_path / "wider")


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.[ipst]*"):
        assert f"({path.name})" in listed, f"{path.name} is not in examples/README.md"


def test_sweep(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(EXAMPLES / "sweep.toml"), "--plan"]) == 0
    assert "6 runs in runs/sweeps/tau" in capsys.readouterr().out


def test_slurm() -> None:
    """The shell understands the script, and `sparring train` its command."""
    path = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    (line,) = re.findall(r"^torchrun .* -m sparring train (.*) &$", path.read_text(encoding="utf-8"), re.MULTILINE)
    recipe, options = options_of(line.split())
    assert recipe == "fat-cifar10-resnet18" and options.resume


def test_evaluate_a_checkpoint(tmp_path) -> None:
    example = script("evaluate_a_checkpoint")
    result = example.main(example.stand_in(tmp_path / "theirs.pt"))
    assert result["pgd20"].accuracy > result["cw30"].accuracy + 0.2
    assert "zero-gradients" in {doubt["name"] for doubt in result.doubts}


def test_geometry_reweighting(monkeypatch, capsys) -> None:
    example = script("geometry_reweighting")
    monkeypatch.setattr(example, "EPOCHS", 12)
    monkeypatch.setattr(example, "PROTOCOLS", "dat")
    plain, reweighted = example.main().values()
    assert plain.doubts == ()
    assert [doubt["name"] for doubt in reweighted.doubts] == ["cw-far-from-ce"]
    assert abs(plain["pgd20"].accuracy - reweighted["pgd20"].accuracy) < 0.1  # PGD alone sees little of it
    assert reweighted["cw30"].accuracy < plain["cw30"].accuracy - 0.1
    assert "cw-far-from-ce: Accuracy" in capsys.readouterr().out


def test_optuna_sweep(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("optuna", reason="pip install optuna")
    example = script("optuna_sweep")
    monkeypatch.setattr(example, "EPOCHS", 1)
    monkeypatch.setattr(example, "TRIALS", 2)
    study = example.main(tmp_path)
    assert len(study.trials) == 2 and 0 <= study.best_value <= 1
    assert (tmp_path / "trial-1" / "last.safetensors").is_file() and "best: trial" in capsys.readouterr().out


def test_the_notebook_tells_the_story() -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbformat nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbformat nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbformat nbclient ipykernel")
    notebook = nbformat.read(EXAMPLES / "the_paper_in_ten_minutes.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "stored without outputs"
    for full, short in (("EPOCHS = 12 ", "EPOCHS = 1 "), ("IMAGES = 450 ", "IMAGES = 50 ")):
        assert full in code[0].source
        code[0].source = code[0].source.replace(full, short)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join(output.get("text", "") for output in outputs)
    assert "steps/image" in printed and "autoattack" in printed
