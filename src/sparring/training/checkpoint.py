"""Checkpoints: tensors and facts in one safetensors file, written whole or not at all.

The file holds numbers and JSON: loading it runs no code. A save goes to a temporary file beside the target,
is flushed to the disk and then renamed over it: after a crash, a kill or a full disk the old file is still whole. A
digest of the facts and of every tensor's name, dtype, shape and numbers detects damage and edits. This module knows no
model and no optimiser.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from sparring.errors import UserError
from sparring.files.json_text import Damaged, Unreadable, parse
from sparring.files.regular import require_regular, shown
from sparring.files.schema import Check, table
from sparring.files.schema import anything as any_value

_FACTS = "sparring"  # the entries of the file's metadata
_FACTS_SUM, _SUM = "sparring_facts_sha256", "sparring_file_sha256"
_HEADER = 2**24  # bytes of a file's header: that of a network with 1,000 tensors has 0.1 MB


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]  # plain JSON

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, without it."""
        cut = len(prefix) + 1
        return {name[cut:]: tensor for name, tensor in self.tensors.items() if name.startswith(f"{prefix}.")}


def save(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, still: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint atomically; `still` as in `replacing`."""
    # Contiguous tensors on the CPU, each with memory of its own: safetensors refuses views and tied weights.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seen: set[int] = set()
    for name, tensor in plain.items():
        place = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if place in seen or tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        seen.add(place)
    with replacing(path, still=still) as temporary:
        temporary.write_bytes(to_bytes(plain, metadata(json.dumps(dict(facts), sort_keys=True), plain)))


def metadata(facts: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a checkpoint: what it records about itself, as JSON, and the sums."""
    return {_FACTS: facts, _FACTS_SUM: _sum(facts), _SUM: _sum(facts, checksum(tensors))}


def load(path: Path, *, device: torch.device | str = "cpu", check: Check | None = None) -> Checkpoint:
    """Read a checkpoint, verify its digest and check its facts."""
    with _opened(path) as file:
        if file is None:
            raise UserError(f"there is no checkpoint at {path}.")
        found = file.metadata() or {}
        facts = _facts(found, path, check)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict: not iterable)
    if _SUM in found and found[_SUM] != _sum(found[_FACTS], checksum(tensors)):
        raise Damaged(f"{path} is damaged: its tensors do not match their checksum. Copy it again, or use another.")
    return Checkpoint({name: tensor.to(device) for name, tensor in tensors.items()}, facts)


def read_facts(path: Path, check: Check | None = None) -> dict[str, Any]:
    """The facts of a checkpoint, without reading its tensors; empty where there is no checkpoint."""
    with _opened(path) as file:
        return {} if file is None else _facts(file.metadata() or {}, path, check)


def read_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of a checkpoint's tensors by name, without reading them; empty where there is no checkpoint."""
    with _opened(path) as file:
        names = [] if file is None else file.keys()
        return {name: list(file.get_slice(name).get_shape()) for name in names}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, opened by safetensors; None where there is none. Its damage is an error of one line."""
    if not path.exists() and not path.is_symlink():
        yield None
        return
    require_regular(path)
    try:
        with path.open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if header > _HEADER:
            raise SafetensorError(f"a header of {header:,} bytes, more than {_HEADER:,}")
        with safe_open(path, framework="pt", device="cpu") as opened:
            yield opened
    except OSError as error:
        reason = error.strerror or shown(str(error), 120)
        raise Unreadable(f"cannot read {path}: {reason}. Check the disk and its permissions, and try again.") from None
    except (SafetensorError, RuntimeError, KeyError) as error:
        reason = shown(str(error), 120)
        raise Damaged(f"{path} is not a whole safetensors file ({reason}). Copy it again, or use another.") from None


def _facts(found: Mapping[str, str], path: Path, check: Check | None) -> dict[str, Any]:
    """What the file records about itself; {} for a file that another program wrote."""
    there = [name in found for name in (_FACTS, _FACTS_SUM, _SUM)]
    text = found.get(_FACTS, "{}")
    if any(there) and not (all(there) and found[_FACTS_SUM] == _sum(text)):
        wrong = "does not match its checksum" if all(there) else "lacks its checksum"
        raise Damaged(f"{path} is damaged: what it records about itself {wrong}. Copy it again, or use another.")
    facts = parse(text, f"what {path} records about itself", check or table(any_value))
    return dict(facts)


def write_text(path: Path, text: str, *, still: Callable[[], None] = lambda: None) -> None:
    """Write a small text file atomically; `still` as in `replacing`."""
    with replacing(path, still=still) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path, *, still: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A temporary path beside `path`, renamed over it at the end of the block unless the block fails.

    `still` is called just before that, and raises where the file may no longer be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _flush(temporary)
        still()
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
    """sha256 of names, dtypes, shapes and numbers, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sum(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
