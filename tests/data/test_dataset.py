from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from sparring.data import Dataset, Split, hold_out, load, whole
from sparring.data.dataset import evenly, in_order, interleaved
from sparring.errors import UserError


def split_of(sizes):
    y = torch.cat([torch.full((n,), label) for label, n in enumerate(sizes)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    x = torch.arange(len(y)).to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 3).contiguous()
    return Split(x, y.long())


def test_take_and_head_select_images():
    split = split_of([3, 4])
    assert len(split) == 7
    assert split.take(torch.tensor([5, 0])).x[:, 0, 0, 0].tolist() == [5, 0]
    assert split.head(2).x[:, 0, 0, 0].tolist() == [0, 1]
    assert len(split.head(100)) == 7
    assert split.to("cpu").x.device.type == "cpu"
    with pytest.raises(UserError, match="n >= 0"):
        split.head(-1)


def grey():
    """Strides as in files, (n, height, width, 1); for torch they are those of channels_last as well."""
    x = torch.from_numpy(np.arange(96, dtype=np.uint8).reshape(4, 4, 6, 1).transpose(0, 3, 1, 2))
    assert x.stride() == (24, 1, 6, 1) and x.is_contiguous() and x.contiguous().stride() == x.stride()
    return x


def test_grey_images_lie_in_the_order_of_their_shape(tmp_path):
    """A convolution of others returns channels_last, which the `view` of a network does not take."""
    x = in_order(grey())
    assert x.stride() == (24, 24, 6, 1) and torch.equal(x, grey())
    assert in_order(torch.zeros(2, 4, 5, 3).permute(0, 3, 1, 2)).stride() == (60, 20, 5, 1)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(3):
            Image.fromarray(np.full((8, 8), 9 * number, dtype=np.uint8)).save(tmp_path / label / f"{number}.png")
    for data in (load("digits"), load(f"folder:{tmp_path}")):
        for split in (data.train, data.test):
            assert split.x.stride() == (64, 64, 8, 1)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(2, 1, 2, 2).double(), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(2)),
    ],
)
def test_split_refuses_wrong_types_and_shapes(x, y):
    with pytest.raises(UserError):
        Split(x, y)


def test_dataset_shape_properties():
    split = split_of([3, 4])
    data = Dataset("d", ("a", "b"), split, split, "made up")
    assert (data.channels, data.size, data.num_classes) == (1, (2, 3), 2)


@pytest.mark.parametrize(
    ("sizes", "count"), [([40, 40, 20], 10), ([7, 5, 3], 4), ([30, 1, 1], 20), ([2, 2], 2), ([9], 0)]
)
def test_hold_out_is_stratified_ordered_and_complete(sizes, count):
    split = split_of(sizes)
    rest, held = hold_out(split, count, seed=3)
    assert (len(rest), len(held)) == (len(split) - count, count)
    ids = [part.x[:, 0, 0, 0].tolist() for part in (rest, held)]
    assert ids[0] == sorted(ids[0]) and ids[1] == sorted(ids[1])
    assert sorted(ids[0] + ids[1]) == list(range(len(split)))
    for label, n in enumerate(sizes):
        assert (rest.y == label).any()
        if n > 1 and len(sizes) == 3 and min(sizes) > 1:
            assert abs(int((held.y == label).sum()) - n * count / len(split)) < 1


def test_hold_out_depends_on_the_seed():
    split = split_of([50, 50])
    one, same, other = (hold_out(split, 20, seed=seed)[1].x.flatten() for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("count", [-1, 9, 10, 11])
def test_hold_out_refuses_impossible_counts(count):
    with pytest.raises(UserError, match="from 1 to 8"):
        hold_out(split_of([5, 5]), count, seed=0)


def test_evenly_spreads_through_every_class():
    y = np.repeat([0, 1, 2, 3], [8, 10, 2, 1])
    marked = evenly(y, 0.25)
    assert [int(marked[y == label].sum()) for label in range(4)] == [2, 2, 1, 0]
    assert np.flatnonzero(marked[:8]).tolist() == [2, 6]
    assert not evenly(np.arange(5), 0.2).any()


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 9], [50, 30, 20, 1]])
def test_every_prefix_of_an_interleaved_order_has_class_proportions(sizes):
    y = np.repeat(np.arange(len(sizes)), sizes)
    order = interleaved(y)
    assert sorted(order) == list(range(len(y)))
    for n in range(1, len(y) + 1):
        held = np.bincount(y[order[:n]], minlength=len(sizes))
        assert np.abs(held - n * np.array(sizes) / len(y)).max() <= 1.0
    assert all((np.diff(order[y[order] == label]) > 0).all() for label in range(len(sizes)))  # else in order


def test_the_fingerprint_covers_training_images_labels_and_classes():
    split, other = split_of([3, 4]), split_of([4, 3])
    data = Dataset("d", ("a", "b"), split, split.head(2), "n")
    same = Dataset("elsewhere", ("a", "b"), split_of([3, 4]), other, "another note")
    assert data.fingerprint == same.fingerprint
    pixel = split.x.clone()
    pixel[3, 0, 1, 2] ^= 1
    changed = [
        replace(data, classes=("a", "c")),
        replace(data, train=other),
        replace(data, train=Split(pixel, split.y)),
        replace(data, train=split.head(6)),
        replace(data, train=Split(split.x.transpose(2, 3).contiguous(), split.y)),
    ]
    assert len({one.fingerprint for one in [data, *changed]}) == 6


def test_whole_returns_every_image_that_was_not_trained_on():
    data = Dataset("d", ("a", "b"), split_of([3, 4]), split_of([1, 1]), "n", carved=True)
    every = whole(data, without=Split(255 - split_of([1, 1]).x, split_of([1, 1]).y))
    assert len(every.test) == 9 and not every.carved and every.note == "all images of d"
    assert every.test.y.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    fewer = whole(data, without=split_of([1, 0]))  # its one image is all zeros, like two others
    assert len(fewer.test) == 7 and fewer.note == "all images of d except 2 used in training"
    assert whole(data, without=data.train) is data  # none is left
    assert len(whole(data, without=Split(torch.zeros(1, 3, 2, 3, dtype=torch.uint8), torch.tensor([0]))).test) == 9
