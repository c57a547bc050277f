"""The data folder, and in it a cache of images that do not fit in memory: arrays as .npy files, mapped when used.

An entry is a folder named by a digest of what it was made from; it is written beside its place and renamed, so an
interruption leaves no half of one. Must not know what the arrays contain.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.errors import UserError


def data_root(root: Path | None = None) -> Path:
    """The folder of fetched data: the given one, else $SPARRING_DATA, else ~/.cache/sparring."""
    if root is not None:
        return root.expanduser()
    return Path(os.environ.get("SPARRING_DATA") or "~/.cache/sparring").expanduser()


def stamp(*facts: object, files: Sequence[Path] = ()) -> str:
    """A digest of these facts and of the names, sizes and times of these files."""
    digest = hashlib.blake2b(repr(facts).encode("utf-8", "replace"), digest_size=16)
    for path in files:
        found = path.stat()
        digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0".encode("utf-8", "replace"))
    return digest.hexdigest()


def entry(name: str, write: Callable[[Path], None]) -> Path:
    """The folder of a cache entry; where there is none, `write` fills it."""
    target = data_root() / "cache" / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from None
    try:
        write(made)
        if not target.is_dir():  # another process may have been faster
            made.rename(target)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def new_array(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """A uint8 array in a new .npy file, to be filled."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)


def mapped(path: Path) -> Tensor:
    """The array of a .npy file, as a tensor that reads the file when it is used."""
    try:
        # Copy on write: torch warns of read-only arrays, and nothing is ever written to the file.
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}). Remove its folder; it is made again.") from None


def _unwritable(target: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {target} ({error.strerror or error}). Free space, or choose another folder with SPARRING_DATA."
    )
