"""Anyone's checkpoint loads, or is refused in one line; nothing in it is ever run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sparring import models, weights
from sparring.cli import export as cli_export
from sparring.errors import UserError
from sparring.training import checkpoint
from sparring.weights import facts, load, load_model
from tests.peers import PeerResNet18, PeerWRN

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2471, 0.2435, 0.2616]
TINY = {"num_classes": 10, "channels": 1, "size": (8, 8)}


def stirred(model: nn.Module) -> nn.Module:
    """Batch-norm statistics as after training, so that forgetting one would show."""
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model.eval()


@pytest.fixture(scope="module")
def peer_wrn() -> PeerWRN:
    torch.manual_seed(0)
    return stirred(PeerWRN(16, 2, sub_block1=True))


@pytest.fixture(scope="module")
def peer_resnet() -> PeerResNet18:
    torch.manual_seed(1)
    return stirred(PeerResNet18())


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def tiny() -> nn.Module:
    torch.manual_seed(2)
    return stirred(models.build("tiny_cnn", **TINY))


def described(
    name: str, num_classes: int, channels: int, size: tuple[int, int], normalize: Any = None
) -> dict[str, Any]:
    return {
        "name": name,
        "num_classes": num_classes,
        "channels": channels,
        "size": list(size),
        "normalize": normalize,
    }


def write_run(folder: Path, model: nn.Module, **model_facts: Any) -> Path:
    """A run folder as training writes it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for which in ("last", "best"):
        tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
        tensors |= {f"momentum.{key}": torch.zeros_like(value) for key, value in model.named_parameters()}
        if which == "best":
            tensors["model.fc.bias"] = tensors["model.fc.bias"] + 1
        checkpoint.save(
            folder / f"{which}.safetensors",
            tensors,
            {"model": model_facts, "data": "digits", "epoch": 3, "recipe": "fat"},
        )
    return folder


def same(left: nn.Module, right: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(left(x), right(x), rtol=1e-5, atol=1e-5)


# --- our own files ---------------------------------------------------------------------------------------------------


def test_run_folder(tmp_path: Path, tiny: nn.Module) -> None:
    run = write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY))
    x = torch.rand(3, 1, 8, 8)
    last, best = load_model(run), load_model(str(run), which="best")
    assert not last.training
    same(last, tiny, x)
    with torch.no_grad():
        torch.testing.assert_close(best(x), tiny(x) + 1, rtol=1e-5, atol=1e-5)
    known = facts(run)
    assert (known["data"], known["epoch"], known["recipe"]) == ("digits", 3, "fat")
    same(load_model(run / "last.safetensors"), tiny, x)  # a single file describes itself


@pytest.mark.parametrize("name", ["tiny_cnn", "small_cnn", "resnet18", "wrn-10-1"])
def test_normalising_models_come_back(tmp_path: Path, name: str, images: Tensor) -> None:
    model = stirred(models.build(name, num_classes=7, normalize=(MEAN, STD)))
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, model.state_dict(), {"model": described(name, 7, 3, (32, 32), [MEAN, STD])})
    same(load_model(path), model, images)
    # and without any facts: everything is read off the tensors
    save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    loaded = load(tmp_path / "foreign.safetensors")
    same(loaded.model, model, images)
    assert loaded.facts["model"]["num_classes"] == 7
    assert facts(tmp_path / "foreign.safetensors") == {}


def test_loading_leaves_the_random_state_alone(tmp_path: Path, tiny: nn.Module) -> None:
    run = write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY))
    before = torch.get_rng_state()
    load_model(run)
    assert torch.equal(before, torch.get_rng_state())


def test_run_folders_that_are_none(tmp_path: Path, tiny: nn.Module) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        load_model(tmp_path)
    run = write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY))
    (run / "best.safetensors").unlink()
    with pytest.raises(UserError, match="no best checkpoint, only 'last'"):
        load_model(run, which="best")
    (run / "last.safetensors").unlink()
    with pytest.raises(UserError, match="saved no checkpoint yet"):
        load_model(run)
    with pytest.raises(UserError, match=r"which must be 'best' or 'last'"):
        load_model(run, which="first")  # type: ignore[arg-type]
    (tmp_path / "weights.pth").write_bytes(b"x")
    with pytest.raises(UserError, match=r"It holds weights\.pth"):
        load_model(tmp_path)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "resnet18_best.pth").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no checkpoint at .*Did you mean 'resnet18_best\.pth'"):
        load_model(tmp_path / "resnet18_bset.pth")
    with pytest.raises(UserError, match="no checkpoint at"):
        load_model(tmp_path / "nowhere" / "x.pth")


def test_a_missing_device_is_said(tmp_path: Path, tiny: nn.Module) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(UserError, match=r"no device 'cuda' here\. Use device='cpu'"):
        load_model(write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY)), device="cuda")


# --- published files -------------------------------------------------------------------------------------------------

WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda sd: sd,
    "DataParallel": lambda sd: {f"module.{k}": v for k, v in sd.items()},
    "compiled": lambda sd: {f"_orig_mod.{k}": v for k, v in sd.items()},
    "TRADES' attack wrapper": lambda sd: {f"module.basic_net.{k}": v for k, v in sd.items()},
    "state_dict": lambda sd: {"epoch": 76, "state_dict": {f"module.{k}": v for k, v in sd.items()}, "best_prec1": 0.9},
    "net": lambda sd: {"net": sd, "acc": 84.5, "epoch": 5},
    "model.state_dict": lambda sd: {"model": {"state_dict": sd}, "rng": torch.get_rng_state()},
    "with its optimiser": lambda sd: {
        "model_state_dict": sd,
        "optimizer": {
            "state": {0: {"momentum_buffer": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        },
        "scheduler": {"milestones": [75, 90], "weight": torch.ones(1)},
    },
    "in a tuple": lambda sd: (sd, 76),
    "averaged": lambda sd: {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in sd.items()}},
    "half": lambda sd: {k: v.half() if v.is_floating_point() else v for k, v in sd.items()},
    "parameters": lambda sd: {k: nn.Parameter(v) if v.is_floating_point() else v for k, v in sd.items()},
    "old torch": lambda sd: {k: v for k, v in sd.items() if not k.endswith("num_batches_tracked")},
    "numpy and argparse": lambda sd: {
        "args": argparse.Namespace(lr=0.1, data=Path("/data")),
        "best": np.float64(0.5),
        "curve": np.arange(4.0),
        "model": sd,
    },
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_published_wrn(tmp_path: Path, peer_wrn: PeerWRN, images: Tensor, wrapping: str, zipped: bool) -> None:
    path = tmp_path / "checkpoint.pth.tar"
    torch.save(WRAPPINGS[wrapping](peer_wrn.state_dict()), path, _use_new_zipfile_serialization=zipped)
    loaded = load(path)
    assert loaded.facts["model"] == described("wrn-16-2", 10, 3, (32, 32))
    assert any("sub_block1" in note and "never uses" in note for note in loaded.notes)
    tolerance = 0.05 if wrapping == "half" else 1e-5
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), peer_wrn(images), rtol=tolerance, atol=tolerance)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_published_resnet18(tmp_path: Path, peer_resnet: PeerResNet18, images: Tensor) -> None:
    path = tmp_path / "resnet18.pt"
    torch.save({"net": {f"module.{k}": v for k, v in peer_resnet.state_dict().items()}}, path)
    same(load_model(path), peer_resnet, images)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    normalised = load_model(path, normalize=(MEAN, STD))
    with torch.no_grad():
        torch.testing.assert_close(normalised(images), peer_resnet((images - mean) / std), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sd: (
            {"mu": torch.tensor(MEAN).view(3, 1, 1), "sigma": torch.tensor(STD).view(3, 1, 1)}
            | {f"model.{k}": v for k, v in sd.items()}
        ),
        lambda sd: {"0.mean": torch.tensor(MEAN), "0.std": torch.tensor(STD)} | {f"1.{k}": v for k, v in sd.items()},
        lambda sd: (
            {"module.normalizer.new_mean": torch.tensor(MEAN), "module.normalizer.new_std": torch.tensor(STD)}
            | {f"module.model.{k}": v for k, v in sd.items()}
            | {f"module.attacker.model.{k}": v for k, v in sd.items()}
        ),
    ],
    ids=["RobustBench", "Sequential", "robustness"],
)
def test_a_normalisation_layer_in_the_file_is_used(
    tmp_path: Path, peer_wrn: PeerWRN, images: Tensor, wrap: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    path = tmp_path / "w.pth"
    torch.save(wrap(peer_wrn.state_dict()), path)
    loaded = load(path)
    assert loaded.facts["model"]["normalize"] == [MEAN, STD]
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), peer_wrn((images - mean) / std), rtol=1e-4, atol=1e-4)
    load_model(path, normalize=(MEAN, STD))  # the same again is no contradiction
    with pytest.raises(UserError, match=r"normalises by itself, with mean \[0\.4914.*Leave normalize out"):
        load_model(path, normalize=([0.5] * 3, [0.5] * 3))


def test_wrn_32_and_34_are_one_network(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(PeerWRN(16, 1).state_dict(), path)
    load_model(path, model="wrn-14-1")  # Madry's count
    load_model(path, model="wrn-16-1")  # TRADES' count


@pytest.mark.parametrize(("name", "size"), [("tiny_cnn", 28), ("small_cnn", 64), ("tiny_cnn", 8), ("small_cnn", 96)])
def test_the_image_size_is_read_off_a_dense_layer(tmp_path: Path, name: str, size: int) -> None:
    model = stirred(models.build(name, num_classes=4, channels=1, size=(size, size)))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    same(load_model(tmp_path / "m.pt"), model, torch.rand(2, 1, size, size))


def test_oblong_images_need_their_size(tmp_path: Path) -> None:
    model = stirred(models.build("tiny_cnn", num_classes=4, channels=1, size=(6, 22)))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"misshaped: fc\.weight"):
        load_model(tmp_path / "m.pt")
    same(load_model(tmp_path / "m.pt", size=(6, 22)), model, torch.rand(2, 1, 6, 22))


def test_a_mismatch_names_keys_and_architecture(tmp_path: Path, peer_wrn: PeerWRN, peer_resnet: PeerResNet18) -> None:
    wrn, odd = tmp_path / "wrn.pt", tmp_path / "odd.pt"
    torch.save(peer_wrn.state_dict(), wrn)
    with pytest.raises(UserError, match=r"missing: block1\.layer\.2.* and \d+ more.*looks like 'wrn-16-2' for 10"):
        load_model(wrn, model="wrn-28-2")
    with pytest.raises(UserError, match=r"missing: layer1.*unexpected: block1.*looks like 'wrn-16-2'"):
        load_model(wrn, model="resnet18")
    with pytest.raises(
        UserError, match=r"with 100 classes\. misshaped: fc\.weight \(10, 128\) instead of \(100, 128\)"
    ):
        load_model(wrn, num_classes=100)
    with pytest.raises(UserError, match=r"unknown model 'wrn'"):
        load_model(wrn, model="wrn")
    deeper = dict(peer_resnet.state_dict())
    deeper["layer3.2.conv1.weight"] = torch.ones(3)
    torch.save(deeper, odd)
    with pytest.raises(UserError, match=r"nearest architecture is 'resnet18'.*unexpected: layer3\.2\.conv1\.weight\."):
        load_model(odd)


def test_mismatches_are_one_line(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict(), tmp_path / "mlp.pt")
    with pytest.raises(UserError, match="no architecture known here") as caught:
        load_model(tmp_path / "mlp.pt")
    assert "\n" not in str(caught.value)


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peer"), [("wrn-16-2", lambda: PeerWRN(16, 2)), ("resnet18", PeerResNet18)], ids=["WRN", "ResNet-18"]
)
def test_peers_load_the_export_strictly(
    tmp_path: Path, name: str, peer: Callable[[], nn.Module], images: Tensor
) -> None:
    ours = stirred(models.build(name, num_classes=10, normalize=(MEAN, STD)))
    head = "linear" if name == "resnet18" else "fc"
    run = tmp_path / "good"
    run.mkdir()
    tensors = {f"model.{key}": value for key, value in ours.state_dict().items()}
    told = {"model": described(name, 10, 3, (32, 32), [MEAN, STD]), "data": "cifar10", "epoch": 9}
    checkpoint.save(run / "last.safetensors", {**tensors, f"momentum.{head}.bias": torch.zeros(10)}, told)

    written = weights.export(run, tmp_path / "out")
    assert [file.name for file in written.files] == ["good-last.safetensors", "good-last.pt"]
    same(load_model(written.safetensors), ours, images)
    assert facts(written.safetensors) == told

    state = torch.load(written.state_dict, weights_only=True)
    theirs = peer().eval()
    theirs.load_state_dict(state, strict=True)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(theirs((images - mean) / std), ours(images), rtol=1e-4, atol=1e-4)
    assert any("without the normalisation layer" in note and str(MEAN) in note for note in written.notes)


def test_export_for_the_class_with_sub_block1(tmp_path: Path, peer_wrn: PeerWRN, images: Tensor) -> None:
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
    with pytest.raises(UserError, match="cannot make the folder"):
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


def test_facts_are_json(tmp_path: Path, tiny: nn.Module) -> None:
    torch.save({"net": tiny.state_dict(), "epoch": 7}, tmp_path / "m.pt")
    assert facts(tmp_path / "m.pt") == {"epoch": 7}
    json.dumps(load(tmp_path / "m.pt").facts)
