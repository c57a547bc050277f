"""The default data set: the 1,797 handwritten digits of scikit-learn, 8x8, one channel, part of that package.

The split is fixed, without randomness: a quarter of every class, evenly spaced, is test data.
"""

from __future__ import annotations

import numpy as np

from sparring.data.dataset import Dataset, evenly, tensor_split


def load_digits() -> Dataset:
    """The digits: 1,347 training and 450 test images."""
    from sklearn import datasets  # imported here: it takes a second, which other data sets do not need

    bunch = datasets.load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]  # the file's values are 0..16
    y = bunch.target.astype(np.int64)
    test = evenly(y, 0.25)
    return Dataset(
        name="digits",
        classes=tuple(str(digit) for digit in range(10)),
        train=tensor_split(x[~test], y[~test]),
        test=tensor_split(x[test], y[test]),
        note="scikit-learn digits, 8x8, every class split 3:1",
    )
