"""Verdicts on disk, so that a killed evaluation continues where it was and nothing known is computed again.

A store is a folder. Inside, one folder per (weights, data) named by their sha256, so that verdicts of another model
or other images are never mixed in; inside that, one file per attack, seed and restart: which examples were judged,
which stand, and the seconds it took. A file is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sparring.attacks.checks import Model
from sparring.errors import UserError
from sparring.evaluation.protocols import Settings
from sparring.training.checkpoint import replacing


@dataclass
class Ledger:
    """The verdicts of one run of one attack, as far as they are known."""

    judged: Tensor  # bool per example, on the CPU
    stands: Tensor  # bool per example: judged and right; True while not judged
    seconds: float = 0.0
    path: Path | None = None
    retried: int = 0  # examples that were attacked twice

    @classmethod
    def empty(cls, n: int, path: Path | None = None) -> Ledger:
        """Nothing known yet."""
        return cls(torch.zeros(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool), 0.0, path)

    def enter(self, rows: Tensor, stands: Tensor, seconds: float, retried: int = 0) -> None:
        """Write verdicts down, on disk too where there is a store."""
        self.judged[rows] = True
        self.stands[rows] = stands.cpu()
        self.seconds += seconds
        self.retried += retried
        if self.path is not None:
            with replacing(self.path) as temporary, temporary.open("wb") as file:
                verdicts = self.judged.numpy(), self.stands.numpy()
                np.savez(file, judged=verdicts[0], stands=verdicts[1], seconds=self.seconds, retried=self.retried)


class Store:
    """Ledgers by attack; kept in memory only where there is no folder."""

    def __init__(self, folder: Path | None, n: int) -> None:
        self.folder = folder
        self.n = n
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot make the folder {folder}: {error.strerror}. Choose another.") from None

    def open(self, name: str, settings: Settings, *, precision: str, seed: int, part: str) -> Ledger:
        """The ledger of one run: as it was left, or empty."""
        if self.folder is None:
            return Ledger.empty(self.n)
        facts = json.dumps([asdict(settings), precision], sort_keys=True)
        digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
        path = self.folder / f"{name.partition('@')[0]}-{digest}-seed{seed}-{part}.npz"
        if not path.exists():
            return Ledger.empty(self.n, path)
        try:
            with np.load(path, allow_pickle=False) as saved:
                judged, stands = torch.from_numpy(saved["judged"]), torch.from_numpy(saved["stands"])
                seconds, retried = float(saved["seconds"]), int(saved["retried"]) if "retried" in saved else 0
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise UserError(f"{path} is not a whole file of verdicts. Delete it; only its part is run again.") from None
        if judged.shape != (self.n,) or stands.shape != (self.n,):
            raise UserError(f"{path} holds {len(judged)} verdicts where {self.n} belong. Delete it.")
        return Ledger(judged, stands, seconds, path, retried)


def open_store(folder: Path | None, model: Model, x: Tensor, y: Tensor) -> Store:
    """The store of this model on these images."""
    if folder is None:
        return Store(None, len(x))
    if not isinstance(model, nn.Module):
        raise UserError(
            "an evaluation can be resumed for an nn.Module only: a plain function has no weights to know it by."
        )
    return Store(folder / fingerprint(model, x, y)[:16], len(x))


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
