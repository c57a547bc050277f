import hashlib

import torch

from sparring.data import load


def test_the_digits_split_is_fixed():
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1347, 450)
    assert (data.channels, data.size, data.classes) == (1, (8, 8), tuple("0123456789"))
    total = data.train.y.bincount() + data.test.y.bincount()
    assert torch.all((data.test.y.bincount() - total / 4).abs() <= 0.5)
    assert (int(data.train.x.min()), int(data.train.x.max())) == (0, 255)
    again = load("digits")
    assert torch.equal(again.train.x, data.train.x) and torch.equal(again.test.y, data.test.y)


def test_levels_are_sixteenths():
    levels = torch.unique(load("digits").train.x)
    assert torch.equal(levels, (torch.arange(17) * 255 / 16).round().to(torch.uint8))


def test_no_image_is_in_both_splits():
    data = load("digits")

    def sums(split):
        return {hashlib.sha256(image.numpy().tobytes()).digest() for image in split.x}

    assert not sums(data.train) & sums(data.test)
