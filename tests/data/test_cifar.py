import pickle

import numpy as np
import pytest
import torch

from sparring.data import cifar, load
from sparring.data.stored import Stored, read_stored, save, stored_path
from sparring.errors import UserError

FORMS = ("python", "binary", "npm")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["tar", "folder", "folder above"])
def test_every_format_gives_the_same_arrays(fake_cifar, form, where, tmp_path):
    if where == "tar":
        source = fake_cifar.tar(form, tmp_path / "archive.tar.gz")
    else:
        source = fake_cifar.folder(form, tmp_path / "unpacked" / "inner")
        source = source.parent if where == "folder above" else source
    stored = cifar.read_source(source)
    assert np.array_equal(stored.arrays["x_train"], fake_cifar.x[:20])
    assert np.array_equal(stored.arrays["x_test"], fake_cifar.x[20:])
    assert np.array_equal(stored.arrays["y_train"], fake_cifar.y[:20])
    assert np.array_equal(stored.arrays["y_test"], fake_cifar.y[20:])
    assert stored.note.startswith("CIFAR-10, from the")


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_pixel_or_label_is_refused(fake_cifar, form, tmp_path):
    fake_cifar.x[21, 3, 4, 1] ^= 1
    with pytest.raises(UserError, match="sha256 of x_test"):
        cifar.read_source(fake_cifar.folder(form, tmp_path / "pixel"))
    fake_cifar.x[21, 3, 4, 1] ^= 1
    fake_cifar.y[2] = (fake_cifar.y[2] + 1) % 10
    with pytest.raises(UserError, match="sha256 of y_train"):
        cifar.read_source(fake_cifar.folder(form, tmp_path / "label"))


@pytest.mark.parametrize(
    ("form", "name", "data", "message"),
    [
        ("python", "test_batch", None, "not a complete CIFAR-10"),
        ("python", "test_batch", pickle.dumps([1, 2]), "no images of 4 x 3072"),
        ("python", "test_batch", pickle.dumps({"data": np.zeros((4, 3072), np.uint8)}), "4 labels"),
        ("python", "test_batch", pickle.dumps({"data": np.zeros((4, 3072))}), "no images"),
        ("python", "test_batch", b"cos\nsystem\n(S'true'\ntR.", "the global os.system"),
        ("python", "test_batch", b"\x80", "readable pickle"),
        ("binary", "data_batch_3.bin", b"\0" * 100, "100 bytes, expected 12292"),
        ("npm", "data_batch_2.png", b"\x89PNG\r\n", "damaged"),
        ("npm", "test_lables.json", b"[1, 2", "damaged"),
        ("npm", "test_lables.json", b"[" * 100_000, "damaged"),
        ("npm", "test_lables.json", b"[1, 2, 3, 10]", "labels from 0 to 9"),
        ("npm", "train_lables.json", b"{}", "labels from 0 to 9"),
    ],
)
def test_bad_files_are_named(fake_cifar, tmp_path, form, name, data, message):
    folder = fake_cifar.folder(form, tmp_path / "bad")
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        cifar.read_source(folder)


def test_truncated_sheet(fake_cifar, tmp_path):
    folder = fake_cifar.folder("npm", tmp_path / "bad")
    whole = (folder / "test_batch.png").read_bytes()
    (folder / "test_batch.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"test_batch.png is damaged"):
        cifar.read_source(folder)


def test_a_missing_cifar10_names_the_command_to_get_it(tmp_path):
    with pytest.raises(UserError, match=r"CIFAR-10 is not at .*. Get it with: sparring data fetch cifar10"):
        load("cifar10", root=tmp_path)


def test_load_verifies_the_checksums(fake_cifar, tmp_path):
    stored = cifar.read_source(fake_cifar.folder("binary", tmp_path / "source"))
    target = stored_path("cifar10", tmp_path)
    target.parent.mkdir()
    save(stored, target, tmp_path)
    data = load("cifar10", root=tmp_path)
    assert torch.equal(data.test.x, torch.from_numpy(fake_cifar.x[20:]).permute(0, 3, 1, 2))
    assert data.classes[6] == "frog" and data.note == stored.note
    stored.arrays["x_train"][0, 0, 0, 0] ^= 1
    save(Stored(stored.arrays, "x"), target, tmp_path)
    assert read_stored(target).note == "x"
    with pytest.raises(UserError, match=r"x_train is not CIFAR-10's. Get it again"):
        load("cifar10", root=tmp_path)


def test_the_real_cifar10():
    if not stored_path("cifar10").is_file():
        pytest.skip("CIFAR-10 is not in $SPARRING_DATA or ~/.cache/sparring. Get it with: sparring data fetch cifar10")
    data = load("cifar10")
    means = data.train.x.double().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.49139968, 0.48215841, 0.44653091], dtype=torch.float64), atol=1e-8)
    assert data.train.y.bincount().tolist() == [5000] * 10 and data.test.y.bincount().tolist() == [1000] * 10
