"""Any checkpoint loads, or is refused in one line; no code in it is run."""

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

from sparring import models
from sparring.errors import UserError
from sparring.training import checkpoint
from sparring.training.initial import begin_from
from sparring.weights import facts, initial, load, load_model
from tests.peers import PeerResNet18, PeerWRN

from .conftest import MEAN, STD, TINY, described, same, stirred, write_run

# --- Sparring's own files --------------------------------------------------------------------------------------------


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
    same(load_model(run / "last.safetensors"), tiny, x)  # a single file records its architecture


@pytest.mark.parametrize("name", ["tiny_cnn", "small_cnn", "resnet18", "wrn-10-1"])
def test_models_with_normalisation_round_trip(tmp_path: Path, name: str, images: Tensor) -> None:
    model = stirred(models.build(name, num_classes=7, normalize=(MEAN, STD)))
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, model.state_dict(), {"model": described(name, 7, 3, (32, 32), [MEAN, STD])})
    same(load_model(path), model, images)
    # and without any facts: everything is identified from the tensors
    save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    loaded = load(tmp_path / "foreign.safetensors")
    same(loaded.model, model, images)
    assert loaded.facts["model"]["num_classes"] == 7
    assert facts(tmp_path / "foreign.safetensors") == {}


def test_loading_leaves_the_random_state_unchanged(tmp_path: Path, tiny: nn.Module) -> None:
    run = write_run(tmp_path / "run", tiny, **described("tiny_cnn", **TINY))
    before = torch.get_rng_state()
    load_model(run)
    assert torch.equal(before, torch.get_rng_state())


def test_folders_that_are_not_runs_are_refused(tmp_path: Path, tiny: nn.Module) -> None:
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


def test_wrong_sizes_and_moments() -> None:
    for wrong in (3, "8x8", (8,)):
        with pytest.raises(UserError, match=r"size must be \(height, width\)"):
            load_model("fat-digits", size=wrong)  # type: ignore[arg-type]
    for wrong in (3, "x", (0.5, 0.25), ([0.5], [0.25], [1.0])):
        with pytest.raises(UserError, match=r"normalize must be \(mean, std\), .* Write for example"):
            load_model("fat-digits", normalize=wrong)  # type: ignore[arg-type]


def test_a_picture_is_not_suggested_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "fat.png").write_bytes(b"x")
    with pytest.raises(UserError, match="Check the path"):
        load_model(tmp_path / "fat.pth")


def test_a_missing_file_suggests_one_with_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "resnet18_best.pth").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no checkpoint at .*Did you mean 'resnet18_best\.pth'"):
        load_model(tmp_path / "resnet18_bset.pth")
    with pytest.raises(UserError, match="no checkpoint at"):
        load_model(tmp_path / "nowhere" / "x.pth")


def test_a_missing_device_is_an_error(tmp_path: Path, tiny: nn.Module) -> None:
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
    load_model(path, normalize=(MEAN, STD))  # the same normalisation is no contradiction
    with pytest.raises(UserError, match=r"has its own normalisation, mean \[0\.4914.*Leave normalize out"):
        load_model(path, normalize=([0.5] * 3, [0.5] * 3))


def test_wrn_32_and_34_are_one_network(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(PeerWRN(16, 1).state_dict(), path)
    load_model(path, model="wrn-14-1")  # Madry's depth convention
    load_model(path, model="wrn-16-1")  # TRADES' depth convention


@pytest.mark.parametrize(("name", "size"), [("tiny_cnn", 28), ("small_cnn", 64), ("tiny_cnn", 8), ("small_cnn", 96)])
def test_the_image_size_is_read_off_a_dense_layer(tmp_path: Path, name: str, size: int) -> None:
    model = stirred(models.build(name, num_classes=4, channels=1, size=(size, size)))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    same(load_model(tmp_path / "m.pt"), model, torch.rand(2, 1, size, size))


def test_the_size_of_non_square_images_must_be_given(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"no known architecture.* --model package\.module:make, in Python") as caught:
        load_model(tmp_path / "mlp.pt")
    assert "\n" not in str(caught.value)


def test_facts_are_json(tmp_path: Path, tiny: nn.Module) -> None:
    torch.save({"net": tiny.state_dict(), "epoch": 7}, tmp_path / "m.pt")
    assert facts(tmp_path / "m.pt") == {"epoch": 7}
    json.dumps(load(tmp_path / "m.pt").facts)


class Inner(nn.Module):
    """All weights in one submodule; with a token, in two parts of other depths."""

    def __init__(self, part: str = "net", token: bool = False):
        super().__init__()
        self.part = part
        setattr(self, part, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        if token:
            self.token = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.part)(x * self.token.view(1, 1, 8, 8) if hasattr(self, "token") else x)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "net."])
@pytest.mark.parametrize(("part", "token"), [("net", False), ("module", False), ("encoder", True)])
def test_names_are_matched_against_those_of_the_given_network(
    tmp_path: Path, prefix: str, part: str, token: bool
) -> None:
    """No more is stripped than makes them fit: the network's own `net.` stays."""
    net, path = Inner(part, token).eval(), tmp_path / "own.pth"
    torch.save({f"{prefix}{key}": value for key, value in net.state_dict().items()}, path)
    loaded = load(path, model=Inner(part, token))
    same(loaded.model, net, torch.rand(2, 1, 8, 8))
    removed = [f"removed the prefix {name!r} from every key." for name in prefix.split(".") if name]
    assert list(loaded.notes) == removed
    begun = Inner(part, token)
    assert begin_from(initial(path), begun, 10) == ""
    same(begun, net, torch.rand(2, 1, 8, 8))


def test_the_refusal_of_a_given_network_names_what_differs(tmp_path: Path) -> None:
    path, state = tmp_path / "own.pth", Inner().state_dict()
    torch.save({f"module.{key}": value for key, value in state.items()} | {"module.net.2.weight": torch.ones(1)}, path)
    with pytest.raises(UserError, match=r"not hold the weights of Inner \(own:Inner\)\. unexpected: net\.2\.weight\.$"):
        load_model(path, model=Inner())


@pytest.mark.parametrize("inside", [True, False])
def test_a_given_network_is_put_behind_the_normalisation(tmp_path: Path, inside: bool) -> None:
    """That of the file, or that of the caller."""
    net, path, x = Inner().eval(), tmp_path / "own.pth", torch.rand(2, 1, 8, 8)
    layer = {"mean": torch.tensor([0.5]), "std": torch.tensor([0.25])} if inside else {}
    torch.save({**layer, **{f"model.{key}": value for key, value in net.state_dict().items()}}, path)
    loaded = load(path, model=Inner(), normalize=None if inside else ([0.5], [0.25]))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(x), net((x - 0.5) / 0.25))
    assert [list(part) for part in loaded.facts["model"]["normalize"]] == [[0.5], [0.25]]


def test_a_given_network_keeps_its_own_normalisation(tmp_path: Path) -> None:
    class Own(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.5]))
            self.register_buffer("std", torch.tensor([0.25]))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x - self.mean) / self.std)

    net, path = Own().eval(), tmp_path / "own.pth"
    torch.save({f"module.{key}": value for key, value in net.state_dict().items()}, path)
    same(load_model(path, model=Own()), net, torch.rand(2, 1, 8, 8))


def test_whole_numbers_are_not_weights(tmp_path: Path, tiny: nn.Module) -> None:
    """A header whose F32 became I32 has the same bytes; every logit would be wrong without a word."""
    path = tmp_path / "m.safetensors"
    described_as = {"model": {"name": "tiny_cnn", **TINY, "size": [8, 8], "normalize": None}}
    checkpoint.save(path, tiny.state_dict(), described_as)
    load_model(path)
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(UserError, match="is damaged: its tensors do not match their checksum"):
        load_model(path)
    checkpoint.save(path, {key: value.int() for key, value in tiny.state_dict().items()}, described_as)
    with pytest.raises(UserError, match=r"is damaged: its weights are not floating point: .*\(int32\)"):
        load_model(path)
    with pytest.raises(UserError, match="not floating point"):
        begin_from(initial(path), models.build("tiny_cnn", **TINY), 10)
