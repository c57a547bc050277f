"""Checkpoints: tensors and facts in one safetensors file, written whole or not at all.

The file holds numbers and JSON: loading it runs no code. A save goes to a temporary file beside the target,
is flushed to the disk and then renamed over it: after a crash, a kill or a full disk the old file is still whole. A
checksum of all tensors detects damage. This module knows no model and no optimiser.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from sparring.errors import UserError

_FACTS, _SUM = "sparring", "sha256"  # the two entries of the file's metadata


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]  # plain JSON

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, without it."""
        cut = len(prefix) + 1
        return {name[cut:]: tensor for name, tensor in self.tensors.items() if name.startswith(f"{prefix}.")}


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically."""
    # Contiguous tensors on the CPU, each with memory of its own: safetensors refuses views and tied weights.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seen: set[int] = set()
    for name, tensor in plain.items():
        place = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if place in seen or tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        seen.add(place)
    metadata = {_FACTS: json.dumps(dict(facts), sort_keys=True), _SUM: checksum(plain)}
    with replacing(path) as temporary:
        temporary.write_bytes(to_bytes(plain, metadata))


def load(path: Path, *, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint and verify its checksum."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict: not iterable)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint at {path}.") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}). Copy it again, or use another.") from None
    if _SUM in metadata and metadata[_SUM] != checksum(tensors):
        raise UserError(f"{path} is damaged: its tensors do not match their checksum. Copy it again, or use another.")
    facts = json.loads(metadata.get(_FACTS, "{}"))
    return Checkpoint({name: tensor.to(device) for name, tensor in tensors.items()}, facts)


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint, without reading its tensors; empty where there is no checkpoint."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict(json.loads((file.metadata() or {}).get(_FACTS, "{}")))
    except FileNotFoundError:
        return {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}). Copy it again, or use another.") from None


def read_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of a checkpoint's tensors by name, without reading them; empty where there is no checkpoint."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    except FileNotFoundError:
        return {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}). Copy it again, or use another.") from None


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed over it at the end of the block unless the block fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        with suppress(OSError):  # some file systems cannot sync a folder
            _flush(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)} What was there before is untouched.") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until the file is on the disk: a rename that overtakes its data leaves an empty file after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full. Free some space, then continue."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "the folder is not writable. Change its permissions or choose another."
    return f"{error.strerror or error}."


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names and numbers, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
