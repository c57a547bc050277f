"""Read published checkpoints (.pt, .pth, .pth.tar) without running code from them.

Only tensors and plain containers are unpickled (`torch.load(weights_only=True)`). The few other objects that are often
saved with weights (an argparse.Namespace, NumPy scalars, paths, dates) are replaced by an inert stand-in, so neither
argparse nor NumPy sees the file's data; every other object is refused by name. The keys are then reduced to plain
names: nesting, prefixes of wrappers and parts that no forward pass uses are removed, each with a note. Must not know
which architectures exist: that is `identify`.
"""

from __future__ import annotations

import math
import re
import tarfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring.errors import UserError

# Keys under which published files keep the weights, the most specific first.
NESTS = ("state_dict", "model_state_dict", "model_state", "net", "model", "network", "weights", "params", "ema")
# Buffers of a normalising first layer: (mean, std), by the names in published files.
NORMALISERS = (("mean", "std"), ("mu", "sigma"), ("new_mean", "new_std"))
_INERT = (
    "argparse.Namespace",
    *(f"numpy{core}.multiarray.{name}" for core in (".core", "._core") for name in ("scalar", "_reconstruct")),
    "numpy.dtype",
    "numpy.ndarray",
    *(f"pathlib{local}.{name}" for local in ("", "._local") for name in ("PosixPath", "WindowsPath", "Path")),
    *(f"datetime.{name}" for name in ("datetime", "date", "timedelta")),
)
_DEPTH = 4  # levels of nesting in which weights are searched
_FIX = "Save its weights alone: torch.save(model.state_dict(), 'weights.pt')."


@dataclass(frozen=True)
class ForeignCheckpoint:
    """The content of a published file, with plain key names."""

    tensors: dict[str, Tensor]  # float32 where they are floating point
    normalize: tuple[list[float], list[float]] | None = None  # (mean, std), where the file has such a layer
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    named: dict[str, Tensor] = field(default_factory=dict)  # the same tensors under the names of the file


class _StandIn:
    """An inert replacement for an object that is not needed: accepts any state and keeps none."""

    def __new__(cls, *_: object) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def read(path: Path) -> ForeignCheckpoint:
    """Read the weights of a published checkpoint."""
    refuse_impostor(path)
    content = _unpickle(path)
    named, notes = _find(content, path)
    found = plain(named, path)
    epoch = content.get("epoch") if isinstance(content, Mapping) else None
    facts = {"epoch": epoch} if type(epoch) is int else {}
    return ForeignCheckpoint(found.tensors, found.normalize, facts, (*notes, *found.notes), found.named)


def plain(named: Mapping[str, Tensor], path: Path) -> ForeignCheckpoint:
    """Reduce the keys of a network to plain names: no prefix of a wrapper, no unused part."""
    notes: list[str] = []
    tensors, normalize = _take_normalisation(dict(named), path)
    if normalize is not None:
        notes.append(f"used the file's normalisation layer: mean {normalize[0]}, std {normalize[1]}.")
    tensors = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[2] != "n_averaged"}
    while True:
        first = {key.partition(".")[0] for key in tensors}
        if first == {"model", "attacker"}:  # the robustness library saves the network twice
            tensors = {key: tensor for key, tensor in tensors.items() if key.startswith("model.")}
            notes.append("left out attacker.*: a second copy of the network.")
        elif len(first) == 1 and all(key.count(".") >= 2 for key in tensors if not key.endswith("num_batches_tracked")):
            (prefix,) = first
            tensors = {key.removeprefix(f"{prefix}."): tensor for key, tensor in tensors.items()}
            notes.append(f"removed the prefix {prefix!r} from every key.")
        else:
            break
    unused = [key for key in tensors if key.startswith("sub_block1.")]
    if unused:
        tensors = {key: tensor for key, tensor in tensors.items() if key not in unused}
        notes.append(f"left out sub_block1 ({len(unused)} tensors): the published WRN creates it and never uses it.")
    return ForeignCheckpoint(_as_numbers(tensors, path), normalize, notes=tuple(notes), named=dict(named))


def refuse_impostor(path: Path) -> None:
    """Refuse a file that is not a checkpoint: empty, a web page, a Git LFS pointer, other text."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}. Check the path and its permissions.") from None
    if path.suffix in (".onnx", ".pt2"):
        raise UserError(
            f"{path} is a program for other runtimes, which Sparring does not read back. Give the run folder or a "
            ".safetensors file."
        )
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        raise UserError(f"{path} is empty: the download or copy failed. Fetch it again.")
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<script", b"<!--")):
        raise UserError(f"{path}: this is a web page, not a checkpoint: the download failed. Fetch the file itself.")
    if text.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer, not the file it stands for. Run `git lfs pull`.")
    if head[:1] in (b"{", b"[") and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        raise UserError(f"{path} is a text file, not a checkpoint. Give a .safetensors, .pt, .pth or .pth.tar file.")


def _unpickle(path: Path) -> Any:
    stand_ins: list[Any] = [(_StandIn, name) for name in _INERT]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
            warnings.simplefilter("ignore")  # about pickle protocols and storages: not useful to the caller
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or malicious pickle can fail anywhere; none of its code has run
        raise UserError(f"{path} {_complaint(path, error)}") from None


def _complaint(path: Path, error: Exception) -> str:
    """Why a file could not be read, and the fix."""
    text = str(error)
    named = re.search(r"GLOBAL (\S+) (?:was not|whose module)", text)
    if named:
        return f"was refused: it holds a pickled object ({named[1]}) that could run code when read. {_FIX}"
    if "TorchScript" in text:
        return f"is a TorchScript program, not a checkpoint. {_FIX}"
    if "legacy .tar format" in text or tarfile.is_tarfile(path):
        return f"is a tar archive. Unpack it first; if it is a checkpoint of torch 0.1: {_FIX}"
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"
    if zipped and not zipfile.is_zipfile(path):
        return "is truncated: a zip archive without its end. Copy or download it again."
    if zipped and not any(name.endswith("data.pkl") for name in _names(path)):
        return "is a zip archive, but not one that torch.save wrote. Unpack it, or give another file."
    if _is_text(path):
        return "is a text file, not a checkpoint. Give the file that torch.save wrote."
    reason = re.sub(r"\s+", " ", text.rpartition("WeightsUnpickler error:")[2]).strip() or type(error).__name__
    return f"is not a complete checkpoint of torch.save ({reason[:120].rstrip('.')}). Copy it again, or use another."


def _names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return []


def _find(content: Any, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The mapping that holds the weights, at any level of nesting."""
    found = dict(_weights_in(content, ()))
    if not found:
        kind = f"a dictionary of {_listed(list(content))}" if isinstance(content, Mapping) else type(content).__name__
        raise UserError(f"{path} holds no weights of a network: it is {kind}. {_FIX}")
    named = [place for nest in NESTS for place in found if place[-1:] == (nest,)]
    place = () if () in found else next(iter(named or found))
    others = [".".join(other) for other in found if other != place]
    if others and not named and place:
        raise UserError(f"{path} holds several networks ({_listed(['.'.join(p) for p in found])}). Save one alone.")
    notes = [f"read the weights under {'.'.join(place)!r}."] if place else []
    if others:
        notes.append(f"other weights in the file were not read: {_listed(others)}.")
    return found[place], notes


def _weights_in(content: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    inside: Iterator[tuple[Any, Any]]
    if isinstance(content, Mapping):
        inside = iter(content.items())
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        inside = iter(enumerate(content))
    else:
        return
    items = [(str(key), value) for key, value in inside if isinstance(key, str | int)]
    # A network has weights; moments of an optimiser or statistics do not.
    tensors = {key: value for key, value in items if isinstance(value, Tensor)}
    if any(key.endswith("weight") for key in tensors):
        yield place, tensors
    if len(place) < _DEPTH:
        for key, value in items:
            if not re.match("optim|sched|scaler", key):
                yield from _weights_in(value, (*place, key))


def _take_normalisation(
    tensors: dict[str, Tensor], path: Path
) -> tuple[dict[str, Tensor], tuple[list[float], list[float]] | None]:
    """Remove (mean, std) of a normalising first layer, under any of their names."""
    pairs: list[tuple[list[float], list[float]]] = []
    for key in list(tensors):
        parent, dot, last = key.rpartition(".")
        for mean_name, std_name in NORMALISERS:
            other = f"{parent}{dot}{std_name}"
            if last == mean_name and other in tensors and tensors[key].numel() == tensors[other].numel() <= 16:
                mean, std = tensors.pop(key), tensors.pop(other)
                pairs.append((_short(mean), _short(std)))
    if not pairs:
        return tensors, None
    if any(pair != pairs[0] for pair in pairs):
        raise UserError(f"{path} holds {len(pairs)} different normalisation layers: {pairs}. Save the network alone.")
    mean_values, _ = pairs[0]
    if any(abs(value) > 1.5 for value in mean_values):
        raise UserError(
            f"{path} normalises pixels in 0..255 (mean {mean_values}); Sparring's pixels lie in [0, 1]. "
            "Divide its mean and std by 255 and save it again."
        )
    return tensors, pairs[0]


def _short(tensor: Tensor) -> list[float]:
    """The shortest decimals that round to the same float32 numbers."""
    return [float(f"{value:.7g}") for value in tensor.detach().to(torch.float32).flatten().tolist()]


def _as_numbers(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Floating-point tensors as float32, integers unchanged; other tensors and non-finite numbers are refused."""
    numbers: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or tensor.is_meta:
            raise UserError(f"{path}: {key} is not a dense tensor of real numbers. Save the weights dense, in float32.")
        numbers[key] = tensor.detach().to(torch.float32) if tensor.is_floating_point() else tensor.detach()
        if not math.isfinite(numbers[key].sum(dtype=torch.float64).item()):  # NaN and infinity survive a sum
            raise UserError(
                f"{path}: {key} holds numbers that are not finite: the training diverged. Use another file."
            )
    return numbers


def _listed(names: Sequence[object], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(512)
    return bool(start) and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
