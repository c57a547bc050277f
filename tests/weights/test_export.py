"""An export loads here and in the published classes; it overwrites nothing that it reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparring import models, weights
from sparring.cli import export as cli_export
from sparring.errors import UserError
from sparring.training import checkpoint
from sparring.weights import facts, load_model
from tests.peers import PeerResNet18, PeerWRN

from .conftest import MEAN, STD, TINY, described, same, stirred, write_run


@pytest.mark.parametrize(
    ("name", "peer"), [("wrn-16-2", lambda: PeerWRN(16, 2)), ("resnet18", PeerResNet18)], ids=["WRN", "ResNet-18"]
)
def test_published_classes_load_the_export_strictly(
    tmp_path: Path, name: str, peer: Callable[[], nn.Module], images: Tensor
) -> None:
    model = stirred(models.build(name, num_classes=10, normalize=(MEAN, STD)))
    head = "linear" if name == "resnet18" else "fc"
    run = tmp_path / "good"
    run.mkdir()
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    recorded = {"model": described(name, 10, 3, (32, 32), [MEAN, STD]), "data": "cifar10", "epoch": 9}
    checkpoint.save(run / "last.safetensors", {**tensors, f"momentum.{head}.bias": torch.zeros(10)}, recorded)

    written = weights.export(run, tmp_path / "out")
    assert [file.name for file in written.files] == ["good-last.safetensors", "good-last.pt"]
    same(load_model(written.safetensors), model, images)
    assert facts(written.safetensors) == recorded

    state = torch.load(written.state_dict, weights_only=True)
    published = peer().eval()
    published.load_state_dict(state, strict=True)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(published((images - mean) / std), model(images), rtol=1e-4, atol=1e-4)
    assert any("has no normalisation layer" in note and str(MEAN) in note for note in written.notes)


def test_export_with_sub_block1_loads_strictly(tmp_path: Path, peer_wrn: PeerWRN, images: Tensor) -> None:
    torch.save(peer_wrn.state_dict(), tmp_path / "theirs.pth.tar")
    written = weights.export(tmp_path / "theirs.pth.tar", tmp_path / "out", sub_block1=True)
    again = PeerWRN(16, 2, sub_block1=True)
    again.load_state_dict(torch.load(written.state_dict, weights_only=True), strict=True)
    same(again.eval(), peer_wrn, images)
    assert [file.name for file in written.files] == ["theirs.safetensors", "theirs.pt"]
    without = weights.export(tmp_path / "theirs.pth.tar", tmp_path / "other")
    assert any("sub_block1" in note for note in without.notes)


def test_export_never_overwrites_what_it_reads(tmp_path: Path, tiny: nn.Module) -> None:
    run = write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY))
    before = (run / "last.safetensors").read_bytes()
    with pytest.raises(UserError, match="would overwrite"):
        weights.export(run / "last.safetensors", run)
    assert (run / "last.safetensors").read_bytes() == before


def test_export_into_a_file_is_refused(tmp_path: Path, tiny: nn.Module) -> None:
    run = write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY))
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="cannot create the folder"):
        weights.export(run, tmp_path / "taken")


def test_the_command(tmp_path: Path, tiny: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY))
    assert cli_export.run([str(run), "--which", "best", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    for file in ("run-best.safetensors", "run-best.pt"):
        assert (tmp_path / "out" / file).is_file()
        assert f"wrote {tmp_path / 'out' / file}" in said
    assert f'model = sparring.load_model("{tmp_path / "out" / "run-best.safetensors"}")' in said
    with pytest.raises(UserError):
        cli_export.run([str(run), "--which", "worst"])
