"""The default data set: scikit-learn's 1,797 handwritten digits, 8x8, one channel, embedded in that package.

The split is fixed and without randomness: a quarter of every class is test data, spread evenly through it.
"""

from __future__ import annotations

import numpy as np

from sparring.data.dataset import Dataset, evenly, tensor_split


def load_digits() -> Dataset:
    """1,347 training and 450 test images."""
    from sklearn import datasets  # imported here: it takes a second that other sources need not pay

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
