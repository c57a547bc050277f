"""Published files: malicious ones and files that are not checkpoints are refused; the rest get plain keys."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from sparring import models
from sparring.errors import UserError
from sparring.weights import foreign, initial, load, load_model


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    return models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))


class Trap:
    """Unpickles to a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def traps(mark: Path) -> dict[str, Any]:
    return {
        "posix.system": Trap(os.system, f"touch {mark}"),
        "eval": Trap(eval, f"open({str(mark)!r}, 'w')"),
        "exec": Trap(exec, f"open({str(mark)!r}, 'w')"),
        "getattr": Trap(getattr, Path, "touch"),
        "io.open": Trap(io.open, str(mark), "w"),
        "torch.nn.modules.linear.Linear": nn.Linear(2, 2),
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("trap", sorted(traps(Path("x"))))
def test_malicious_files_are_refused(tmp_path: Path, tiny: nn.Module, trap: str, zipped: bool) -> None:
    mark, path = tmp_path / "ran", tmp_path / "trap.pth"
    torch.save(
        {"state_dict": tiny.state_dict(), "extra": traps(mark)[trap]}, path, _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(
        UserError, match=rf"refused: it holds a pickled object \({re.escape(trap)}\).* Save its weights"
    ):
        load_model(path)
    assert not mark.exists()


def test_a_bare_pickle_is_refused(tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "trap.pt"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Trap(os.system, f"touch {mark}"), protocol=protocol))
        with pytest.raises(UserError):
            load_model(path)
    assert not mark.exists()


def test_an_allowed_name_cannot_be_used_to_run_code(tmp_path: Path) -> None:
    """argparse.Namespace and NumPy's names are replaced by stand-ins, whatever their arguments."""
    mark, path = tmp_path / "ran", tmp_path / "trap.pt"
    torch.save({"a": argparse.Namespace(x=Trap(os.system, f"touch {mark}"))}, path)
    with pytest.raises(UserError, match=r"posix\.system"):
        load_model(path)
    torch.save({"a": np.array([Trap(os.system, f"touch {mark}")], dtype=object)}, path)
    with pytest.raises(UserError, match=r"posix\.system"):
        load_model(path)
    assert not mark.exists()


def test_allowed_globals_are_reset_after_loading(tmp_path: Path, tiny: nn.Module) -> None:
    before = torch.serialization.get_safe_globals()
    torch.save({"args": argparse.Namespace(a=1), "net": tiny.state_dict()}, tmp_path / "m.pt")
    load_model(tmp_path / "m.pt")
    assert set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    with pytest.raises(UserError, match="TorchScript program"):
        load_model(tmp_path / "script.pt")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".pth.tar"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><title>Google Drive - Virus scan warning</title>", "a web page, not a checkpoint"),
        (b"\n  <html>", "a web page, not a checkpoint: the download failed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b'{"message": "Not Found"}', "is a text file"),
        (b"some words", "is a text file|is not a"),
        (bytes(range(256)) * 4, "is not a"),
    ],
)
def test_files_that_are_not_checkpoints_are_refused(tmp_path: Path, suffix: str, content: bytes, says: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_images_are_refused_as_such(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "photo.pth"
    Image.new("RGB", (8, 8)).save(path, kind)
    for read in (load_model, initial):
        with pytest.raises(UserError, match=r"photo\.pth is an image, not a checkpoint\. Give a run folder"):
            read(path)


def test_a_length_that_spells_an_image_is_none() -> None:
    assert foreign.is_image(b"BM" + bytes(10)) and not foreign.is_image(b"BM" + bytes(6) + b'{"')


def test_archives_that_are_not_checkpoints_are_refused(tmp_path: Path, tiny: nn.Module) -> None:
    torch.save(tiny.state_dict(), tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.write(tmp_path / "m.pt", "m.pt")
    with pytest.raises(UserError, match="zip archive, but not one that"):
        load_model(tmp_path / "a.pth")
    with tarfile.open(tmp_path / "b.pth.tar", "w") as tar:
        tar.add(tmp_path / "m.pt", "m.pt")
    with pytest.raises(UserError, match="is a tar archive"):
        load_model(tmp_path / "b.pth.tar")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_truncated_files_are_refused(tmp_path: Path, tiny: nn.Module, share: float, zipped: bool) -> None:
    path = tmp_path / "m.pth"
    torch.save(tiny.state_dict(), path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="is truncated" if zipped else "not a complete checkpoint") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes change, the result is a model or an error of one line."""
    buffer = io.BytesIO()
    state = models.build("tiny_cnn", num_classes=2, channels=1, size=(4, 4)).state_dict()
    torch.save({"net": state, "args": argparse.Namespace(a=1)}, buffer, _use_new_zipfile_serialization=False)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, min(len(content), 6000) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.pth"
    path.write_bytes(content)
    try:
        load_model(path)
    except UserError as error:
        assert "\n" not in str(error)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "locked.pth"
    path.write_bytes(b"x")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(UserError, match="cannot read"):
        load_model(path)


# --- contents of a file ----------------------------------------------------------------------------------------------


def test_files_without_exactly_one_network_are_refused(tmp_path: Path, tiny: nn.Module) -> None:
    path = tmp_path / "x.pt"
    torch.save({"epoch": 3, "loss": [1.0]}, path)
    with pytest.raises(UserError, match=r"holds no weights of a network: it is a dictionary of 'epoch', 'loss'"):
        load_model(path)
    torch.save(torch.ones(3), path)
    with pytest.raises(UserError, match="holds no weights of a network: it is Tensor"):
        load_model(path)
    torch.save({"teacher": tiny.state_dict(), "student": tiny.state_dict()}, path)
    with pytest.raises(UserError, match="several networks"):
        load_model(path)
    torch.save({"state_dict": tiny.state_dict(), "ema": tiny.state_dict()}, path)
    assert any("not read: 'ema'" in note for note in load(path).notes)
    broken = dict(tiny.state_dict())
    broken["fc.bias"] = broken["fc.bias"] * float("nan")
    torch.save(broken, path)
    with pytest.raises(UserError, match=r"fc\.bias holds numbers that are not finite"):
        load_model(path)


def test_plain_does_not_modify_its_argument(tiny: nn.Module) -> None:
    named = {f"module.{key}": value for key, value in tiny.state_dict().items()}
    before = dict(named)
    foreign.plain(named, Path("x"))
    assert named == before


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex64)], ids=["sparse", "complex"]
)
def test_a_name_with_control_characters_stays_in_its_line(
    tmp_path: Path, tiny: nn.Module, tensor: torch.Tensor
) -> None:
    path = tmp_path / "weights.pt"
    torch.save({**tiny.state_dict(), "a\nb\x1b[31m": tensor}, path)
    with pytest.raises(UserError, match=r"'a\\nb\\x1b\[31m'") as caught:
        load_model(path)
    assert str(caught.value).isprintable()
