"""CIFAR-100, MNIST, Fashion-MNIST and Tiny ImageNet from small made files: read, stored, refused where damaged."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sparring.data import cifar100, fetch, idx, load, tiny_imagenet
from sparring.data.idx import FILES
from sparring.errors import UserError


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def write_idx(path: Path, array: np.ndarray, *, packed: bool) -> None:
    data = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


@pytest.fixture
def digits(tmp_path, rng, monkeypatch):
    """Ten training and five test images in idx files; MNIST's counts are theirs."""
    y = np.arange(15, dtype=np.uint8) % 5
    x = rng.integers(0, 256, (15, 28, 28), dtype=np.uint8)
    counts = {"train": (2,) * 5 + (0,) * 5, "test": (1,) * 5 + (0,) * 5}
    monkeypatch.setattr(idx, "COUNTS", {"mnist": counts, "fashion-mnist": counts})
    folder = tmp_path / "files"
    folder.mkdir()
    for key, array in zip(FILES, (x[:10], y[:10], x[10:], y[10:]), strict=True):
        write_idx(folder / FILES[key], array, packed=key.startswith("x"))
    return folder, x, y


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_from_a_folder_or_an_archive(digits, tmp_path, make_tar, name):
    folder, x, y = digits
    tar = make_tar(tmp_path / "a.tgz", {f"package/data/{path.name}": path.read_bytes() for path in folder.iterdir()})
    for source in (folder, tar):
        root = tmp_path / f"root-{source.name}"
        fetch(name, root=root, source=source, progress=False)
        data = load(name, root=root)
        assert data.name == name and len(data.classes) == 10 and data.channels == 1
        assert np.array_equal(data.train.x[:, 0].numpy(), x[:10]) and np.array_equal(data.test.x[:, 0].numpy(), x[10:])
        assert data.train.y.tolist() == y[:10].tolist()
        assert load(f"{name}:{data.classes[3]}+{data.classes[1]}", root=root).num_classes == 2


def test_damaged_idx_files_are_refused(digits, tmp_path):
    folder, _, y = digits

    def refused(says, name="mnist"):
        with pytest.raises(UserError, match=says) as caught:
            fetch(name, root=tmp_path / "root", source=folder, progress=False)
        assert "\n" not in str(caught.value) and not (tmp_path / "root" / name / f"{name}.npz").exists()

    images = folder / f"{FILES['x_train']}.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[:-20])
    refused("damaged")
    images.write_bytes(gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 10, 28, 28) + b"abc"))
    refused("3 values, its header says 7840")
    images.write_bytes(gzip.compress(b"<html>"))
    refused("is not an idx file")
    images.unlink()
    refused("train-images-idx3-ubyte is missing")
    images.write_bytes(whole)
    write_idx(folder / FILES["y_train"], y[:10] * 0, packed=False)
    refused("labels are not those of MNIST")
    write_idx(folder / FILES["y_train"], y[:9], packed=False)
    refused("has the shape")


def test_sets_that_are_not_downloaded_say_what_to_give(tmp_path):
    for name in ("mnist", "fashion-mnist", "tiny-imagenet"):
        with pytest.raises(UserError, match=f"sparring data fetch {name} --source PATH"):
            fetch(name, root=tmp_path)
        with pytest.raises(UserError, match=f"sparring data fetch {name} --source FOLDER"):
            load(name, root=tmp_path)
    with pytest.raises(UserError, match="sparring data fetch cifar100"):
        load("cifar100", root=tmp_path)


@pytest.fixture
def hundred(rng, monkeypatch):
    """The files of a CIFAR-100 with two training images and one test image per class."""
    monkeypatch.setattr(cifar100, "PER_CLASS", {"train": 2, "test": 1})
    files = {"meta": pickle.dumps({b"fine_label_names": [name.encode() for name in cifar100.CLASSES]}, protocol=2)}
    for part, count in (("train", 200), ("test", 100)):
        x, y = rng.integers(0, 256, (count, 3072), dtype=np.uint8), [i % 100 for i in range(count)]
        fields = {b"data": x, b"fine_labels": y, b"coarse_labels": [0] * count, b"filenames": [b"a.png"] * count}
        files[part] = pickle.dumps(fields, protocol=2)
    return files


def test_cifar100_is_read(hundred, tmp_path, make_tar):
    tar = make_tar(tmp_path / "a.tar.gz", {f"cifar-100-python/{name}": data for name, data in hundred.items()})
    fetch("cifar100", root=tmp_path / "root", source=tar, progress=False)
    data = load("cifar100", root=tmp_path / "root")
    assert len(data.train) == 200 and len(data.test) == 100 and data.classes[:2] == ("apple", "aquarium_fish")
    planes = pickle.loads(hundred["train"])[b"data"].reshape(200, 3, 32, 32)
    assert np.array_equal(data.train.x.numpy(), planes)
    assert load("cifar100:bee+apple", root=tmp_path / "root").num_classes == 2


def test_damaged_cifar100_is_refused(hundred, tmp_path, make_tar):
    def refused(says, **changed):
        files = {name: data for name, data in (hundred | changed).items() if data}
        tar = make_tar(tmp_path / "a.tar.gz", {f"cifar-100-python/{name}": data for name, data in files.items()})
        with pytest.raises(UserError, match=says) as caught:
            fetch("cifar100", root=tmp_path / "root", source=tar, progress=False)
        assert "\n" not in str(caught.value)

    refused("train missing", train=b"")
    refused("not a readable pickle", train=hundred["train"][:-30])
    refused("has no images of 200 x 3072", train=hundred["test"])
    refused("class names in meta", meta=pickle.dumps({b"fine_label_names": [b"cat"]}))
    fields = pickle.loads(hundred["train"])
    refused("labels from 0 to 99", train=pickle.dumps(fields | {b"fine_labels": [100] * 200}, protocol=2))
    refused("train part is not CIFAR-100", train=pickle.dumps(fields | {b"fine_labels": [3] * 200}, protocol=2))
    refused("the global os.system|posix.system", train=b"cos\nsystem\n(S'true'\ntR.")


@pytest.fixture
def tiny(tmp_path, rng, monkeypatch):
    """The folder of a Tiny ImageNet with three classes, two training images and one validation image each."""
    monkeypatch.setattr(tiny_imagenet, "CLASSES", 3)
    monkeypatch.setattr(tiny_imagenet, "PER_CLASS", {"train": 2, "test": 1})
    folder, ids = tmp_path / "tiny-imagenet-200", ["n03", "n01", "n02"]

    def write(path, mode="RGB"):
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (64, 64) if mode == "L" else (64, 64, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path, "JPEG")

    for name in ids:
        for number in range(2):
            write(folder / "train" / name / "images" / f"{name}_{number}.JPEG", "L" if number else "RGB")
    for number in range(3):
        write(folder / "val" / "images" / f"val_{number}.JPEG")
    lines = [f"val_{number}.JPEG\t{ids[2 - number]}\t0\t0\t62\t62" for number in range(3)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines))
    (folder / "wnids.txt").write_text("\n".join(ids))
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tox\nn03\tox\n")
    return folder


def test_tiny_imagenet_is_read(tiny, tmp_path):
    for source in (tiny, tiny.parent):
        fetch("tiny-imagenet", root=tmp_path / "root", source=source, progress=False)
    data = load("tiny-imagenet", root=tmp_path / "root")
    assert data.classes == ("ox (n03)", "goldfish", "ox (n02)") and data.size == (64, 64) and data.channels == 3
    assert data.train.y.tolist() == [0, 0, 1, 1, 2, 2] and sorted(data.test.y.tolist()) == [0, 1, 2]
    with Image.open(tiny / "val" / "images" / "val_2.JPEG") as image:  # its class is n03, the first
        assert np.array_equal(data.test.x[data.test.y.tolist().index(0)].permute(1, 2, 0).numpy(), np.asarray(image))
    assert "validation images are the test part" in data.note and "classes:" not in data.note


def test_damaged_tiny_imagenet_is_refused(tiny, tmp_path):
    def refused(says):
        with pytest.raises(UserError, match=says) as caught:
            fetch("tiny-imagenet", root=tmp_path / "root", source=tiny, progress=False)
        assert "\n" not in str(caught.value)

    one = tiny / "train" / "n01" / "images" / "n01_0.JPEG"
    whole = one.read_bytes()
    one.write_bytes(whole[:300])
    refused("n01_0.JPEG cannot be read")
    one.unlink()
    refused("5 train images, Tiny ImageNet has 6")
    one.write_bytes(whole)
    annotations = tiny / "val" / "val_annotations.txt"
    kept = annotations.read_text()
    annotations.write_text(kept.replace("n03", "n99"))
    refused("names a class that wnids.txt lacks")
    annotations.unlink()
    refused("cannot read .*val_annotations.txt")
    (tiny / "wnids.txt").write_text("n01\nn01\n")
    refused("names 1 classes, expected 3")
    (tiny / "wnids.txt").unlink()
    refused("wnids.txt is missing")
