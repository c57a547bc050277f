"""Extra images with labels, such as generated ones, that are mixed into every batch: `npz:FILE`.

The file has x_train and y_train, or `image` and `label` as in files of generated images. Must not know batches.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparring.data.dataset import Split, tensor_split
from sparring.data.npz import images, labels, listed_keys, npz_keys, read_npz
from sparring.errors import UserError

_KEYS = (("x_train", "y_train"), ("image", "label"), ("x", "y"))


EXTRA_FRACTION = 0.7  # of a batch, unless given


def check_extra(spec: str, fraction: float) -> None:
    """Refuse a source of extra images that is none, or a share that is none."""
    if not isinstance(spec, str) or (spec and not spec.startswith("npz:")) or spec == "npz:":
        found = repr(spec) if isinstance(spec, str) else f"a {type(spec).__name__}"
        raise UserError(f"extra must be npz:FILE, a file with x_train and y_train, got {found}.")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"extra_fraction must lie in (0, 1), got {fraction!r}. Write for example 0.7.")
    if not spec and fraction != EXTRA_FRACTION:
        raise UserError(f"extra_fraction {fraction:g} is a share of extra images. Give them: extra='npz:FILE'.")


def load_extra(spec: str, *, classes: int) -> tuple[Split, str]:
    """The extra images, and a digest of them."""
    path = Path(spec.removeprefix("npz:")).expanduser()
    there = npz_keys(path)
    pair = next((keys for keys in _KEYS if all(key in there for key in keys)), None)
    if pair is None:
        raise UserError(
            f"{path} lacks x_train and y_train (it has {listed_keys(there)}). "
            "Save it with np.savez(path, x_train=..., y_train=...)."
        )
    arrays = read_npz(path, pair)
    x, y = images(arrays[pair[0]], pair[0]), labels(arrays[pair[1]], pair[1])
    if len(x) != len(y):
        raise UserError(f"{path} has {len(x)} images and {len(y)} labels. Give one label per image.")
    if y.max() >= classes:
        raise UserError(
            f"{path} has the label {y.max()}, the training data only 0 to {classes - 1}. Number them alike."
        )
    split = tensor_split(x, y)
    digest = hashlib.blake2b(digest_size=16)
    split.add_to(digest)
    return split, digest.hexdigest()
