from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from sparring.errors import UserError
from sparring.training import checkpoint

TENSORS = {
    "model.a": torch.arange(6.0).reshape(2, 3),
    "model.n": torch.tensor(5),
    "momentum.a": torch.ones(2, 3).bfloat16(),
}
FACTS = {"epoch": 3, "best": None, "eps": 8 / 255, "model": {"name": "tiny_cnn"}}


def test_round_trip(tmp_path):
    path = tmp_path / "last.safetensors"
    checkpoint.save(path, TENSORS, FACTS)
    found = checkpoint.load(path)
    assert found.facts == FACTS == checkpoint.read_facts(path)
    assert checkpoint.read_facts(tmp_path / "none") == {}
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert found.part("model").keys() == {"a", "n"}
    assert os.listdir(tmp_path) == ["last.safetensors"]  # noqa: PTH208


def test_views_and_shared_storage_are_written(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    checkpoint.save(tmp_path / "x", {"a": base.t(), "b": base[1:]}, {})
    found = checkpoint.load(tmp_path / "x").tensors
    assert torch.equal(found["a"], base.t())
    assert torch.equal(found["b"], base[1:])


def test_damage_is_detected(tmp_path):
    path = tmp_path / "x.safetensors"
    checkpoint.save(path, TENSORS, FACTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    for read in (checkpoint.load, checkpoint.read_facts):
        with pytest.raises(UserError, match="not a whole safetensors file"):
            read(path)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(UserError, match="damaged: its tensors do not match their checksum"):
        checkpoint.load(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="not a whole"):
        checkpoint.load(path)
    with pytest.raises(UserError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "nothing")


@pytest.mark.parametrize("moment", ["write", "flush", "rename"])
@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "not writable")])
def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch, moment, code, message):
    path = tmp_path / "last.safetensors"
    checkpoint.save(path, TENSORS, FACTS)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    target = {"write": (Path, "write_bytes"), "flush": (os, "fsync"), "rename": (Path, "replace")}[moment]
    monkeypatch.setattr(*target, fail)
    with pytest.raises(UserError, match=message):
        checkpoint.save(path, {"other": torch.zeros(9)}, {})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.safetensors"]


def test_folder_that_cannot_be_flushed_is_not_an_error(tmp_path, monkeypatch):
    """Some network file systems refuse it."""
    original = os.fsync

    def picky(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", picky)
    checkpoint.save(tmp_path / "last.safetensors", TENSORS, FACTS)
    assert checkpoint.load(tmp_path / "last.safetensors").facts == FACTS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full; nothing to install")
def test_full_device_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="the disk is full"), checkpoint.replacing(tmp_path / "x"):
        Path("/dev/full").write_bytes(b"x" * 100_000)
