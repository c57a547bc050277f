"""Verdicts on disk, so that an interrupted evaluation continues where it stopped and computes nothing twice.

A store is a folder. It has one subfolder per (weights, data), named by their sha256, so that verdicts of another model
or other images are never mixed in; there, one file per attack, seed and restart: which examples were judged, which are
correct, which rounding leaves in doubt, and the seconds it took. Models with the same weights and another code are told
apart by their logits on a few images, which lie there too. Files are written atomically.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.attacks.checks import Model
from sparring.errors import UserError
from sparring.evaluation.protocols import Settings
from sparring.files.json_text import Damaged, Unreadable, read_bytes
from sparring.files.leftovers import sweep
from sparring.training.checkpoint import replacing
from sparring.training.distributed import ALONE, World

_LOGITS = "logits.npy"
_ROOM = 8192  # bytes of a file besides its verdicts


@dataclass
class Ledger:
    """The verdicts of one attack, seed and restart, as far as they are known."""

    judged: Tensor  # bool per example, on the CPU
    correct: Tensor  # bool per example: classified correctly; True while not judged
    doubtful: Tensor  # bool per example: its verdict is left to another attack, in finer numbers
    seconds: float = 0.0
    path: Path | None = None
    retried: int = 0  # examples attacked again in fp32

    @classmethod
    def empty(cls, n: int, path: Path | None = None) -> Ledger:
        """A ledger without verdicts."""
        none = torch.zeros(n, dtype=torch.bool)
        return cls(none, ~none, none.clone(), path=path)

    def enter(self, rows: Tensor, correct: Tensor, seconds: float, retried: int = 0) -> None:
        """Record verdicts, on disk too where there is a store."""
        self.judged[rows] = True
        self.correct[rows] = correct.cpu()
        self.seconds += seconds
        self.retried += retried
        self.write()

    def join(self, world: World) -> None:
        """Take over what the other processes have judged. The first one then holds all verdicts on disk."""
        if not world.grouped:
            return
        self.merge(world)
        self.retried = int(world.total(torch.tensor([self.retried])))
        if world.first:
            self.write()
        world.wait()
        if self.path is not None and not world.first:
            self.path.unlink(missing_ok=True)

    def merge(self, world: World) -> None:
        """Let every process know what any of them knows."""
        mine = torch.stack([self.judged, ~self.correct, self.doubtful]).long()
        judged, wrong, doubtful = world.total(mine)
        self.judged, self.correct, self.doubtful = judged > 0, wrong == 0, doubtful > 0

    def write(self) -> None:
        """Put the verdicts on disk, where there is a store."""
        if self.path is not None:
            with replacing(self.path) as temporary, temporary.open("wb") as file:
                np.savez(
                    file,
                    judged=self.judged.numpy(),
                    stands=self.correct.numpy(),
                    doubtful=self.doubtful.numpy(),
                    seconds=self.seconds,
                    retried=self.retried,
                )


class Store:
    """Ledgers by attack; in memory only where there is no folder."""

    def __init__(self, folder: Path | None, n: int, world: World = ALONE) -> None:
        self.folder, self.n, self.world = folder, n, world
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot create the folder {folder}: {error.strerror}. Choose another.") from None
            sweep(folder, lambda name: name.endswith(".npz"))

    def open(self, name: str, settings: Settings, *, precision: str, seed: int, part: str) -> Ledger:
        """The ledger of one attack, seed and part: as it was saved, or empty."""
        if self.folder is None:
            return Ledger.empty(self.n)
        facts = json.dumps([_facts(settings), precision], sort_keys=True)
        digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
        path = self.folder / f"{name.partition('@')[0]}-{digest}-seed{seed}-{part}.npz"
        mine = path if self.world.first else path.with_suffix(f".process{self.world.rank}.npz")
        found = Ledger.empty(self.n, mine)
        with self.world.together():
            left = sorted(path.parent.glob(f"{path.stem}.process*.npz"))
            for each in (path, *left):
                if each.exists():
                    self._read(each, found)
        found.merge(self.world)  # the same for all, whatever disk each of them sees
        if not self.world.first:
            found.retried, found.seconds = 0, 0.0  # the first one's count
        elif left:
            found.write()
            for each in left:
                each.unlink(missing_ok=True)
        self.world.wait()
        return found

    def _read(self, path: Path, found: Ledger) -> None:
        """Add the verdicts of a file; those of processes that were stopped lie in files of their own."""
        judged, correct, doubtful, seconds, retried = _read(path, self.n)
        found.judged |= judged
        found.correct &= correct
        found.doubtful |= doubtful
        found.seconds, found.retried = found.seconds + seconds, found.retried + retried


def _read(path: Path, n: int) -> tuple[Tensor, Tensor, Tensor, float, int]:
    """The verdicts in a file: judged, correct, doubtful, seconds, retried.

    Raises:
        Unreadable: reading it failed, which says nothing about its verdicts.
        Damaged: it does not hold the verdicts on n images.
    """
    advice = "Delete it; only this part of the evaluation runs again."
    content = read_bytes(path, most=3 * n + _ROOM, fix=advice)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > 3 * n + _ROOM:
                raise ValueError("larger than its verdicts")
            found = {name: _array(archive.read(name)) for name in archive.namelist()}
        judged, correct = found["judged.npy"], found["stands.npy"]
        doubtful = found.get("doubtful.npy", np.zeros_like(judged, bool))  # older files have none
        seconds, retried = float(found["seconds.npy"]), int(found.get("retried.npy", np.zeros(())))
        fits = judged.dtype == correct.dtype == doubtful.dtype == bool and doubtful.shape == judged.shape
        if not fits or not 0 <= seconds < math.inf or not 0 <= retried <= n * 1000:
            raise ValueError("no verdicts")
    except Exception:  # whatever zipfile, zlib and numpy raise about content
        raise Damaged(f"{path} is damaged. {advice}") from None
    if judged.shape != (n,) or correct.shape != (n,):
        raise Damaged(f"{path} holds {judged.size} verdicts, expected {n}. {advice}")
    return torch.from_numpy(judged), torch.from_numpy(correct), torch.from_numpy(doubtful), seconds, retried


def _array(content: bytes) -> NDArray[Any]:
    """An array of numpy's own format whose header does not promise more than is there."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError("another version")
    shape, _, kind = np.lib.format.read_array_header_1_0(file)
    if kind.hasobject or math.prod(shape) * kind.itemsize != len(content) - file.tell():
        raise ValueError("more or less than it says")
    return np.frombuffer(content, kind, offset=file.tell()).reshape(shape).copy()


def _facts(settings: Settings) -> dict[str, Any]:
    """What names a file; the usual norm does not enter, as in stores that were written without norms."""
    return {name: value for name, value in asdict(settings).items() if (name, value) != ("norm", "linf")}


def open_store(folder: Path, model: Model, x: Tensor, y: Tensor, world: World = ALONE, *, logits: Tensor) -> Store:
    """The store for this model and these images. `logits`: the model's on some of them."""
    if not isinstance(model, nn.Module):
        raise UserError(
            "only the evaluation of an nn.Module can be resumed: a plain function has no weights to identify it by. "
            "Leave out store, or wrap the function in an nn.Module."
        )
    name = fingerprint(model, x, y)[:16]
    chosen = _place(folder, name, logits.double().cpu().numpy()) if world.first else None
    return Store(folder / world.from_first(chosen), len(x), world)


def _place(folder: Path, name: str, logits: NDArray[Any]) -> str:
    """The name of the subfolder whose model had these logits, rounding apart; a new one has them from now on."""
    number = 1
    while True:
        name_here = name if number == 1 else f"{name}-{number}"
        path = folder / name_here / _LOGITS
        if not path.parent.exists():
            Store(path.parent, 0)
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, logits)
            return name_here
        if _same_logits(path, logits):
            return name_here
        number += 1


def _same_logits(path: Path, logits: NDArray[Any]) -> bool:
    if not path.exists():
        return False
    try:
        kept = _array(read_bytes(path, most=logits.nbytes + _ROOM))
    except Unreadable:
        raise
    except Exception:  # whatever numpy raises about content: of another model, for all that is known
        return False
    near = 1e-3 * float(np.abs(np.nan_to_num(kept)).max(initial=0.0))
    return kept.shape == logits.shape and np.allclose(kept, logits, rtol=0.0, atol=near, equal_nan=True)


def fingerprint(model: nn.Module, x: Tensor, y: Tensor) -> str:
    """sha256 of the model's structure and weights, the images and the labels."""
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            _add(digest, name, tensor)
    _add(digest, "x", x)
    _add(digest, "y", y)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
