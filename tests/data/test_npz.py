import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from sparring.data import load
from sparring.errors import UserError

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
Y = np.arange(12) % 3


def saved(tmp_path, **arrays):
    arrays = {"x_train": X, "y_train": Y, "x_test": X[:4], "y_test": Y[:4]} | arrays
    np.savez(tmp_path / "own.npz", **{key: value for key, value in arrays.items() if value is not None})
    return f"npz:{tmp_path / 'own.npz'}"


def test_nhwc(tmp_path):
    data = load(saved(tmp_path))
    assert (data.name, data.classes, data.size, data.channels) == ("own", ("0", "1", "2"), (6, 5), 3)
    assert torch.equal(data.train.x, torch.from_numpy(X).permute(0, 3, 1, 2)) and data.train.x.is_contiguous()
    assert data.train.y.tolist() == Y.tolist() and len(data.test) == 4
    assert "own.npz" in data.note


def test_nchw_and_grey_and_columns_of_labels(tmp_path):
    planes = X.transpose(0, 3, 1, 2)
    data = load(saved(tmp_path, x_train=planes, x_test=planes[:4], y_train=Y[:, None].astype(np.int32)))
    assert torch.equal(data.train.x, torch.from_numpy(planes.copy()))
    data = load(saved(tmp_path, x_train=X[..., 0], x_test=X[:4, ..., 0], y_train=Y.astype(np.uint8)))
    assert data.channels == 1 and torch.equal(data.train.x[:, 0], torch.from_numpy(X[..., 0].copy()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exact_floats_become_the_same_bytes(tmp_path, dtype):
    x = X.astype(dtype) / dtype(255)
    data = load(saved(tmp_path, x_train=x, x_test=X[:4]))
    assert torch.equal(data.train.x, torch.from_numpy(X).permute(0, 3, 1, 2))


def test_without_test_images_a_fifth_is_split_off(tmp_path):
    spec = saved(tmp_path, x_train=np.tile(X, (5, 1, 1, 1)), y_train=np.tile(Y, 5), x_test=None, y_test=None)
    data = load(spec)
    assert (len(data.train), len(data.test)) == (48, 12)
    assert data.test.y.bincount().tolist() == [4, 4, 4]
    assert "a fifth of every class" in data.note
    assert torch.equal(load(spec).test.x, data.test.x)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": None}, "lacks x_train"),
        ({"y_test": None}, "lacks y_test"),
        ({"x_test": None}, "lacks x_test"),
        ({"x_train": X[..., :2]}, "1, 3 or 4 channels"),
        ({"x_train": X.reshape(12, -1)}, "Images must be"),
        ({"x_train": X[:0]}, "empty"),
        ({"x_train": X[:5]}, "5 images but y_train 12 labels"),
        ({"y_test": Y[:3]}, "4 images but y_test 3 labels"),
        ({"x_test": X[:4, :5]}, "6x5x3 and x_test of 5x5x3"),
        ({"x_train": X.astype(np.int64)}, "astype"),
        ({"x_train": X.astype(np.float32)}, r"must lie in \[0, 1\]"),
        ({"x_train": X.astype(np.float32) / 255 - 0.5}, r"must lie in \[0, 1\]"),
        ({"x_train": np.full(X.shape, np.nan)}, r"must lie in \[0, 1\]"),
        ({"x_train": np.full(X.shape, 0.3333)}, "np.rint"),
        ({"y_train": Y.astype(np.float32)}, "must be integers"),
        ({"y_train": Y == 0}, "must be integers"),
        ({"y_train": Y - 1}, "negative label"),
        ({"y_train": np.full(12, 2**63, dtype=np.uint64)}, "negative label"),
        ({"y_train": Y * 2}, "none is 1"),
        ({"y_train": Y + 1}, "none is 0"),
        ({"y_train": Y + 10**15}, "none is 0"),
        ({"y_train": Y * 0}, "one class only"),
        ({"y_test": Y[:4] + 2}, "Train on every class"),
        ({"y_train": np.stack([Y, Y], 1)}, "one class number per image"),
        ({"x_train": X[:3], "y_train": Y[:3], "x_test": None, "y_test": None}, "none can be test data"),
        ({"y_train": np.array([object()] * 12)}, "pickled objects"),
    ],
)
def test_refusals_end_in_the_fix(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        load(saved(tmp_path, **arrays))


def test_files_that_are_not_npz_are_refused(tmp_path):
    path = tmp_path / "own.npz"
    with pytest.raises(UserError, match="no such file"):
        load(f"npz:{path}")
    saved(tmp_path)
    whole = path.read_bytes()
    plain = io.BytesIO()
    np.save(plain, X)
    broken_zip = io.BytesIO()
    with zipfile.ZipFile(broken_zip, "w") as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': '|u1'")
    flipped = bytearray(whole)
    flipped[400] ^= 0xFF
    contents = [b"", b"hello", whole[: len(whole) // 2], plain.getvalue(), pickle.dumps([1]), broken_zip.getvalue()]
    for content in [*contents, bytes(flipped)]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"np\.savez"):
            load(f"npz:{path}")


def test_a_pickle_inside_is_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    spec = saved(tmp_path, y_train=np.array([Trap()] * 12, dtype=object))
    with pytest.raises(UserError, match="never loaded"):
        load(spec)
    assert not (tmp_path / "ran").exists()


def test_a_forgotten_factor_of_255_is_refused(tmp_path):
    y = np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x_train=(np.arange(20 * 16) % 2).reshape(20, 4, 4).astype(np.uint8), y_train=y)
    with pytest.raises(UserError, match=r"no value above 1, of 255\. Save x_train \* 255"):
        load(f"npz:{tmp_path / 'a.npz'}")


def test_string_labels_are_refused(tmp_path):
    x = np.full((4, 4, 4), 7, np.uint8)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.array(["cat", "dog", "cat", "dog"]))
    with pytest.raises(UserError, match=r"holds words.*np\.unique\(y_train, return_inverse=True\)"):
        load(f"npz:{tmp_path / 'a.npz'}")


def test_split_off_test_images_are_in_class_proportions(tmp_path):
    x, y = np.arange(40 * 16, dtype=np.int64).reshape(40, 4, 4) % 251, np.repeat(np.arange(4), 10)
    np.savez(tmp_path / "a.npz", x_train=x.astype(np.uint8), y_train=y)
    data = load(f"npz:{tmp_path / 'a.npz'}")
    assert data.carved and data.test.y.tolist() == [0, 1, 2, 3] * 2
    np.savez(tmp_path / "b.npz", x_train=x.astype(np.uint8), y_train=y, x_test=x.astype(np.uint8), y_test=y)
    data = load(f"npz:{tmp_path / 'b.npz'}")
    assert not data.carved and data.test.y.tolist() == y.tolist()  # a given order is kept
