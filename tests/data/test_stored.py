import os
import time

import numpy as np
import pytest

from sparring.data import stored
from sparring.data.stored import Stored, data_root, read_stored, save, scratch, stored_path
from sparring.errors import UserError

ARRAYS = {key: np.arange(6, dtype=np.uint8) for key in stored.KEYS}


def test_the_data_folder_comes_from_argument_environment_or_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARRING_DATA", str(tmp_path / "env"))
    assert data_root() == tmp_path / "env" and data_root(tmp_path) == tmp_path
    monkeypatch.delenv("SPARRING_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert stored_path("svhn") == tmp_path / ".cache" / "sparring" / "svhn" / "svhn.npz"


def test_round_trip(tmp_path):
    target = tmp_path / "a" / "a.npz"
    with scratch(target) as folder:
        save(Stored(ARRAYS, "où? né à Zürich"), target, folder)
    got = read_stored(target)
    assert got.note == "où? né à Zürich" and all(np.array_equal(got.arrays[key], ARRAYS[key]) for key in ARRAYS)
    assert list(target.parent.iterdir()) == [target]


def test_other_contents_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **{**ARRAYS, "x_test": np.zeros(3)})
    with pytest.raises(UserError, match="fetch it again"):
        read_stored(tmp_path / "a.npz")


def test_an_interruption_leaves_the_old_file_and_no_scratch(tmp_path, monkeypatch):
    target = tmp_path / "a.npz"
    target.write_bytes(b"old")

    def interrupted(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt), scratch(target) as folder:
        save(Stored(ARRAYS, ""), target, folder)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "a.npz"
    target.write_bytes(b"old")

    def full(file, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match=r"No space left.*SPARRING_DATA"), scratch(target) as folder:
        save(Stored(ARRAYS, ""), target, folder)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write"), scratch(tmp_path / "file" / "a" / "a.npz"):
        pass


def test_the_scratch_folder_of_an_interrupted_fetch_is_removed_after_a_day(tmp_path):
    for name, age in ((".fetch-old", 2 * 86400), (".fetch-new", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / ".fetch-gone").symlink_to("nowhere")  # like one that another fetch has just removed
    with scratch(tmp_path / "a.npz"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".fetch-new", ".fetch-gone"}
