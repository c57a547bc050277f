"""Data that a caller hands in: every kind gives the same images, and what cannot be meant is refused in one line."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from sparring.data import Passing, Rows, Split, as_dataset, as_test_split, load, training_batches
from sparring.errors import UserError

N = 24


@pytest.fixture(scope="module")
def pixels():
    return torch.randint(0, 256, (N, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def y():
    return torch.arange(N) % 3


class Listed(torch.utils.data.Dataset):
    """Items by a function of the index, with class names as torchvision has them."""

    classes = ("ant", "bee", "cat")

    def __init__(self, image, y=None, count=N):
        self.image, self.count = image, count
        self.y = y if y is not None else [i % 3 for i in range(count)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        return self.image(index), self.y[index]


class Noisy(Listed):
    """Random transforms, from all three global states."""

    def __init__(self, pixels):
        super().__init__(lambda i: pixels[i].float() / 255)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        scale = (torch.rand(()).item() + np.random.rand() + random.random()) / 3
        return x * scale, y


class Flow(IterableDataset):
    def __init__(self, pixels, y, shorter=False):
        self.pixels, self.y, self.shorter, self.passes = pixels, y, shorter, 0

    def __iter__(self):
        self.passes += 1
        count = len(self.pixels) - (8 if self.shorter and self.passes > 2 else 0)
        return iter(zip(self.pixels[:count], self.y[:count].tolist(), strict=True))


class Failing(Flow):
    def __iter__(self):
        return ((x, 1 // int(number < 12)) for number, x in enumerate(self.pixels))


def kinds(pixels, y):
    floats = pixels.float() / 255
    yield "tensors", (pixels, y)
    yield "tensors", (floats, y)
    yield "tensors", (floats.double(), y.int())
    yield "tensors", (pixels, y.tolist())
    yield "tensors", Split(pixels, y)
    yield "arrays", (pixels.numpy(), y.numpy())
    yield "arrays", (pixels.permute(0, 2, 3, 1).numpy(), y.numpy().astype(np.uint8))
    yield "arrays", (floats.permute(0, 2, 3, 1).numpy(), y.numpy()[:, None])
    yield "dataset", TensorDataset(pixels, y)
    yield "dataset", Listed(lambda i: floats[i])
    yield "dataset", Listed(lambda i: pixels[i].permute(1, 2, 0).numpy(), y.numpy())
    yield "dataset", Listed(lambda i: Image.fromarray(pixels[i].permute(1, 2, 0).numpy()))
    yield "loader", DataLoader(TensorDataset(floats, y), batch_size=5, shuffle=True)


def test_every_kind_gives_the_same_images(pixels, y):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    prints = set()
    for kind, given in kinds(pixels, y):
        data, name = as_dataset(given)
        assert name == f"own:{kind}" and isinstance(data.train, Split)
        assert data.train.x.dtype == torch.uint8 and torch.equal(data.train.x, pixels), kind
        assert torch.equal(data.train.y, y) and len(data.test) == 0 and "no test part" in data.note
        assert data.num_classes == 3
        with_test, _ = as_dataset((given, given))
        assert torch.equal(with_test.test.x.sum(), pixels.sum()) and "no test part" not in with_test.note
        prints.add(data.fingerprint if data.classes[0] == "0" else "named")
    assert len(prints) == 2
    assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[2]
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_images_between_the_levels_stay_floats(y):
    x = torch.rand(N, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    for given in ((x, y), TensorDataset(x, y), (x.numpy(), y.numpy())):
        data, _ = as_dataset(given)
        assert data.train.x.dtype == torch.float32 and torch.equal(data.train.x, x)
    half = torch.cat([(x[:12] * 255).round() / 255, x[12:]])
    data, _ = as_dataset(TensorDataset(half, y))
    assert torch.allclose(data.train.x, half, atol=1e-7)


def test_grey_pictures_and_class_names(pixels):
    data, _ = as_dataset(Listed(lambda i: Image.fromarray(pixels[i, 0].numpy())))
    assert (
        data.channels == 1 and data.classes == ("ant", "bee", "cat") and torch.equal(data.train.x[:, 0], pixels[:, 0])
    )


def test_names_and_data_sets(tmp_path, pixels, y):
    data, name = as_dataset("digits")
    assert name == "digits" and data.fingerprint == load("digits").fingerprint
    assert as_dataset(data)[0] is data
    np.savez(tmp_path / "a.npz", x_train=pixels.numpy(), y_train=y.numpy(), x_test=pixels.numpy(), y_test=y.numpy())
    assert as_dataset(tmp_path / "a.npz")[1] == f"npz:{tmp_path / 'a.npz'}"
    mixed, name = as_dataset(("digits", (data.test.x[:5], data.test.y[:5])))
    assert len(mixed.test) == 5 and name == "own:dataset"


def test_random_items_are_read_by_index_and_repeat(pixels):
    data, _ = as_dataset(Noisy(pixels))
    assert isinstance(data.train, Rows) and "random" in data.note
    how = {"seed": 1, "augment": "none"}
    before = torch.get_rng_state()
    one = list(training_batches(data.train, 7, epoch=1, **how))
    torch.rand(3)  # the caller's draws do not matter
    again = list(training_batches(data.train, 7, epoch=1, **how))
    later = list(training_batches(data.train, 7, epoch=1, start=2, **how))
    assert all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(one, again, strict=True))
    assert all(torch.equal(a.x, b.x) for a, b in zip(one[2:], later, strict=True))
    other = list(training_batches(data.train, 7, epoch=2, **how))
    assert {round(float(b.x.sum()), 3) for b in one}.isdisjoint({round(float(b.x.sum()), 3) for b in other})
    torch.set_rng_state(before)
    assert data.fingerprint == as_dataset(Noisy(pixels))[0].fingerprint
    assert data.fingerprint != as_dataset(Noisy(255 - pixels))[0].fingerprint


def test_a_dataset_larger_than_memory_is_read_by_index(pixels, y):
    small, _ = as_dataset(TensorDataset(pixels, y))
    large, _ = as_dataset(TensorDataset(pixels, y), room=100)
    assert isinstance(large.train, Rows) and "larger than half of the memory" in large.note
    for a, b in zip(*(training_batches(d.train, 7, seed=1, epoch=1) for d in (small, large)), strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


def test_workers_read_the_same(pixels):
    loader = DataLoader(Noisy(pixels), batch_size=4, shuffle=True, num_workers=1)
    data, name = as_dataset(loader)
    assert name == "own:loader" and isinstance(data.train, Rows)
    alone, _ = as_dataset(Noisy(pixels))
    for a, b in zip(*(training_batches(d.train, 12, seed=1, epoch=1) for d in (data, alone)), strict=True):
        assert torch.equal(a.x, b.x)


def test_own_ways_of_a_loader_are_kept(pixels, y):
    images = TensorDataset(pixels, y)
    sampler = WeightedRandomSampler([1.0] * N, N)
    for loader in (
        DataLoader(Flow(pixels, y), batch_size=5),
        DataLoader(images, batch_size=5, sampler=sampler),
        DataLoader(images, batch_size=5, collate_fn=lambda batch: torch.utils.data.default_collate(batch)),
        DataLoader(images, batch_sampler=[[0, 1, 2], [3, 4]]),
    ):
        before = torch.get_rng_state()
        data, name = as_dataset(loader)
        assert name == "own:loader" and isinstance(data.train, Passing) and "as they come" in data.note
        epochs = [list(training_batches(data.train, 5, seed=1, epoch=e)) for e in (1, 1, 2)]
        assert all(torch.equal(a.x, b.x) for a, b in zip(epochs[0], epochs[1], strict=True))
        assert torch.equal(before, torch.get_rng_state())
        with pytest.raises(UserError, match="cannot start there"):
            training_batches(data.train, 5, seed=1, epoch=1, start=1)
        assert data.fingerprint == as_dataset(loader)[0].fingerprint
    flow, _ = as_dataset(DataLoader(Flow(pixels, y), batch_size=5))
    assert (len(flow.train), flow.train.batches, flow.train.largest) == (N, 5, 5)
    first = next(iter(training_batches(flow.train, 5, seed=1, epoch=1)))
    assert torch.equal(first.x, pixels[:5].float() / 255)


def test_an_iterable_that_ends_early_is_refused(pixels, y):
    data, _ = as_dataset(DataLoader(Flow(pixels, y, shorter=True), batch_size=4))
    with pytest.raises(UserError, match="ended early: 4 of 6 batches in epoch 1"):
        list(training_batches(data.train, 4, seed=1, epoch=1))


BAD = [
    (lambda x, y: (x.float(), y), r"floats from 0 to 255.*Divide by 255"),
    (lambda x, y: (x.float() / 128 - 1, y), "Put the normalisation into the model"),
    (lambda x, y: (x.float() / 0, y), "must lie in"),
    (lambda x, y: (x, y + 1), "1 to 3; classes are numbered from 0. Give y - 1"),
    (lambda x, y: (x, y.float()), "torch.float32; class numbers are integers. Give y.long()"),
    (lambda x, y: (x, torch.nn.functional.one_hot(y)), r"one-hot, it seems. Give class numbers: y.argmax\(1\)"),
    (lambda x, y: (x, y[:-1]), "24 images and 23 labels"),
    (lambda x, y: (x, -y), "number the classes from 0"),
    (lambda x, y: (x, y * 0), "one class only"),
    (lambda x, y: (x, y * 100), "a label 200"),
    (lambda x, y: (x, np.array(["a"] * N)), "words"),
    (lambda x, y: (x, None), "the labels of the training data are a NoneType"),
    (lambda x, y: (x.permute(0, 2, 3, 1), y), r"the channels look last.*permute\(0, 3, 1, 2\)"),
    (lambda x, y: (x[:0], y[:0]), "is empty"),
    (lambda x, y: (x.int(), y), "torch.int32. Give uint8"),
    (lambda x, y: (x.numpy().astype(np.int64), y.numpy()), r"must be uint8. Give x.astype"),
    (lambda x, y: (x.clamp(0, 1).numpy(), y.numpy()), r"no value above 1"),
    (lambda x, y: (x.flatten(1), y), r"have the shape \(24, 108\)"),
    (lambda x, y: x, r"images without labels. Give both: data=\(x, y\)"),
    (lambda x, y: (x, y, x, y), "four arrays"),
    (lambda x, y: (x, y, 3), "a tuple of 3 parts"),
    (lambda x, y: (x, DataLoader(TensorDataset(x, y))), "Give it alone: data=loader"),
    (lambda x, y: (DataLoader(TensorDataset(x, y)), y), "Give it alone: data=loader"),
    (lambda x, y: ((DataLoader(TensorDataset(x, y)), y), None), "The test part|the test part|a DataLoader"),
    (lambda x, y: ((x / 255).to_sparse(), y), r"are a sparse tensor. Give x.to_dense\(\)"),
    (lambda x, y: 7, "data is a int. Give tensors"),
    (lambda x, y: {"x": x}, "data is a dict"),
    (lambda x, y: iter([(x, y)]), "read only once"),
    (lambda x, y: Flow(x, y), "Give a DataLoader"),
    (lambda x, y: "no/such/folder", "no such file or folder: no/such/folder"),
    (lambda x, y: "arrays.npz", "no such file or folder: arrays.npz"),
    (lambda x, y: "cifar11", "Did you mean 'cifar10'"),
    (lambda x, y: "own:loader", "handed in from Python"),
    (lambda x, y: ((x, y), (x[:, :1], y)), r"shape \(3, 6, 6\) and the test images \(1, 6, 6\)"),
    (lambda x, y: ((x, y), (x, y + 1)), "the test part has the label 3"),
    (lambda x, y: Listed(lambda i: x[i, :, : 6 - i % 2]), r"differ in size: \(3, 6, 6\) and \(3, 5, 6\)"),
    (lambda x, y: Listed(lambda i: x[i].float()), "item 0 of the Dataset.*Divide by 255"),
    (
        lambda x, y: Listed(lambda i: x[i] * torch.nan),
        "item 0 of the Dataset.*108 of 108 values NaN or.* Look at the data",
    ),
    (lambda x, y: Listed(lambda i: "cat.png"), "item 0 of the Dataset is a str; give a tensor"),
    (lambda x, y: Listed(lambda i: x[i], y.float()), "the label of item 0.*class number"),
    (lambda x, y: Listed(lambda i: x[i], torch.nn.functional.one_hot(y)), "one-hot"),
    (lambda x, y: Listed(lambda i: x[i], count=0), "is empty"),
    (lambda x, y: Listed(lambda i: 1 / 0), "item 0 of the Dataset cannot be read .ZeroDivisionError"),
    (lambda x, y: TensorDataset(x), "expected .image, label."),
    (lambda x, y: DataLoader(Flow(x, y, False), batch_size=5, collate_fn=lambda b: {"x": 1}), "is a dict, expected"),
    (lambda x, y: DataLoader(Flow(x[:0], y[:0]), batch_size=5), "no batches"),
    (lambda x, y: DataLoader(Failing(x, y), batch_size=5), r"batch 3 of the loader cannot be read \(ZeroDivisionError"),
]


@pytest.mark.parametrize(("make", "says"), BAD, ids=range(len(BAD)))
def test_bad_input_is_one_line(pixels, y, make, says):
    with pytest.raises(UserError, match=says) as caught:
        as_dataset(make(pixels, y))
    assert "\n" not in str(caught.value)


def test_images_to_evaluate_on(pixels, y):
    for _, given in kinds(pixels, y):
        assert len(as_test_split(given)) == N
    assert len(as_test_split(DataLoader(TensorDataset(pixels, y), batch_size=5), limit=7)) == 10
    assert torch.equal(as_test_split("digits").x, load("digits").test.x)
    with pytest.raises(UserError, match="Give the test part"):
        as_test_split(((pixels, y), (pixels, y)))
    with pytest.raises(UserError, match="no test images"):
        as_test_split(as_dataset((pixels, y))[0])
