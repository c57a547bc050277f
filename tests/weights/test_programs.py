"""Programs compute what the model computes, for any batch size, and say what they are."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparring import models, weights
from sparring.errors import UserError
from sparring.training import checkpoint
from sparring.weights import programs
from tests.own_networks import ViT

from .conftest import MEAN, STD, TINY, described, stirred

CIFAR = {"num_classes": 10, "channels": 3, "size": (32, 32)}
THREAT = {"norm": "linf", "eps": 0.3}


def written(folder: Path, name: str, sizes: dict, normalize: object = None) -> tuple[Path, nn.Module]:
    """A file with a network, and the network."""
    torch.manual_seed(0)
    model = stirred(models.build(name, **sizes, normalize=normalize))
    classes = [f"class {i}" for i in range(10)]
    facts = {"model": {**described(name, **sizes, normalize=normalize), "classes": classes}, "threat": THREAT}
    checkpoint.save(folder / "model.safetensors", model.state_dict(), facts)
    return folder / "model.safetensors", model


def batch(sizes: dict, n: int) -> Tensor:
    return torch.rand(n, sizes["channels"], *sizes["size"], generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize(
    ("name", "sizes", "normalize"),
    [("tiny_cnn", TINY, ([0.3], [0.2])), ("small_cnn", CIFAR, None), ("resnet18", CIFAR, (MEAN, STD))],
    ids=["tiny_cnn", "small_cnn", "resnet18"],
)
def test_onnx_agrees_with_torch(tmp_path: Path, name: str, sizes: dict, normalize: object) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    pytest.importorskip("onnxscript", reason="pip install onnx onnxscript")
    path, model = written(tmp_path, name, sizes, normalize)
    state = torch.get_rng_state()
    made = weights.export(path, tmp_path / "out.onnx", format="onnx")
    assert torch.equal(state, torch.get_rng_state())
    assert made.files == (tmp_path / "out.onnx",) and made.path == made.files[0]
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["pixels"]
    for n in (1, 3):
        (logits,) = session.run(["logits"], {"pixels": batch(sizes, n).numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(batch(sizes, n)), rtol=1e-4, atol=1e-4)
    properties = session.get_modelmeta().custom_metadata_map
    assert json.loads(properties["classes"])[3] == "class 3" and json.loads(properties["size"]) == list(sizes["size"])
    assert float(properties["eps"]) == 0.3 and properties["norm"] == "linf"
    assert json.loads(properties["sparring"])["model"]["name"] == name


def test_pt2_agrees_with_torch(tmp_path: Path) -> None:
    path, model = written(tmp_path, "tiny_cnn", TINY, ([0.3], [0.2]))
    made = weights.export(path, tmp_path, format="pt2")
    said = {programs.EXTRA_FILE: ""}
    program = torch.export.load(made.path, extra_files=said).module()
    for n in (1, 3):
        torch.testing.assert_close(program(batch(TINY, n)), model(batch(TINY, n)), rtol=1e-5, atol=1e-5)
    facts = json.loads(said[programs.EXTRA_FILE])
    assert facts["threat"] == THREAT and facts["model"]["classes"][9] == "class 9"


class Branches(nn.Module):
    """Decides by the values of its images."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.mean() > 2 else x


class CountsRows(nn.Module):
    """Takes the batch size as a number of Python's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + torch.zeros(1, 1).expand(len(x), -1)


@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_a_network_that_cannot_be_traced_is_refused(
    tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, with torch's reason and without what torch prints and logs of it."""
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="pip install onnx onnxscript")
    write = programs.write_pt2 if form == "pt2" else programs.write_onnx
    disabled = logging.root.manager.disable
    with pytest.raises(
        UserError, match=rf"cannot be exported as {form}: Could not guard [^()]*\(u0, 1\)\. Its .*--format safetensors"
    ) as caught:
        write(tmp_path / f"x.{form}", Branches(), {"model": {"channels": 1, "size": [8, 8]}})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300
    assert capfd.readouterr() == ("", "") and logging.root.manager.disable == disabled


@pytest.mark.parametrize("form", ["pt2", "onnx"])
@pytest.mark.parametrize("kind", [CountsRows, ViT])
def test_a_program_for_one_batch_size_is_refused(tmp_path: Path, form: str, kind: type[nn.Module]) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="pip install onnx onnxscript")
    write = programs.write_pt2 if form == "pt2" else programs.write_onnx
    with pytest.raises(UserError, match=rf"as {form} for batches of any size: .* as len\(x\)") as caught:
        write(tmp_path / f"x.{form}", kind().eval(), {"model": {"channels": 1, "size": [8, 8]}})
    assert str(caught.value).isprintable() and not list(tmp_path.iterdir())


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written(tmp_path, "tiny_cnn", TINY)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"ONNX needs the package onnxscript\. Run: pip install onnx onnxscript"):
        weights.export(path, tmp_path / "out", format="onnx")


@pytest.mark.parametrize(("form", "out"), [("pt2", "a.onnx"), ("safetensors", "a.pt2")])
def test_a_suffix_of_another_format_is_refused(tmp_path: Path, form: weights.Format, out: str) -> None:
    path, _ = written(tmp_path, "tiny_cnn", TINY)
    with pytest.raises(UserError, match=f"Add --format {Path(out).suffix[1:]}"):
        weights.export(path, tmp_path / out, format=form)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "tiny_cnn", TINY)
    with pytest.raises(UserError, match="unknown format 'tflite'"):
        weights.export(path, tmp_path, format="tflite")  # type: ignore[arg-type]


def test_a_module_in_place_of_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"takes the path of a run folder or a file, got Flatten\. .* model=net"):
        weights.export(nn.Flatten(), tmp_path)  # type: ignore[arg-type]
