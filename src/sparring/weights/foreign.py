"""Read published checkpoints (.pt, .pth, .pth.tar) without running code from them.

`torch_file` reads them as data: tensors and plain containers. The few other objects that are often saved with weights
(an argparse.Namespace, NumPy scalars, paths, dates) are passed over; every other object is refused by name. The keys
are then reduced to plain names: nesting, prefixes of wrappers and parts that no forward pass uses are removed, each
with a note. Must not know which architectures exist: that is `identify`.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring.errors import UserError
from sparring.files.opcodes import ForbiddenName
from sparring.files.regular import require_regular, shown
from sparring.weights import torch_file
from sparring.weights.torch_file import NotReadable, OtherTensor, StoredTensor, TorchFile

# Keys under which published files keep the weights, the most specific first.
NESTS = ("state_dict", "model_state_dict", "model_state", "net", "model", "network", "weights", "params", "ema")
# Buffers of a normalising first layer: (mean, std), by the names in published files.
NORMALISERS = (("mean", "std"), ("mu", "sigma"), ("new_mean", "new_std"))
_DEPTH = 4  # levels of nesting in which weights are searched
_VISITED = 10**6  # entries that are searched, about 2 s: references can make a small file endless
_LONGEST = 256  # characters of a tensor's name: those of the deepest networks have 80
_FIX = "Save its weights alone: torch.save(model.state_dict(), 'weights.pt')."


@dataclass(frozen=True)
class Reading:
    """The tensors of a file under one choice of names, as stored."""

    tensors: dict[str, Tensor]
    normalize: tuple[list[float], list[float]] | None = None  # (mean, std), where they are not among the tensors
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignCheckpoint:
    """The content of a published file, with plain key names."""

    tensors: dict[str, Tensor]  # float32 where they are floating point
    normalize: tuple[list[float], list[float]] | None = None  # (mean, std), where the file has such a layer
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()  # the file's own names, then fewer and fewer prefixes


def read(path: Path) -> ForeignCheckpoint:
    """Read the weights of a published checkpoint."""
    refuse_impostor(path)
    file = _open(path)
    content = file.content
    stored, notes = _find(content, path)
    found = plain(_numbers(file, stored), path)
    epoch = content.get("epoch") if isinstance(content, Mapping) else None
    facts = {"epoch": epoch} if type(epoch) is int else {}
    readings = tuple(replace(reading, notes=(*notes, *reading.notes)) for reading in found.readings)
    return ForeignCheckpoint(found.tensors, found.normalize, facts, (*notes, *found.notes), readings)


def plain(named: Mapping[str, Tensor], path: Path) -> ForeignCheckpoint:
    """Reduce the keys of a network to plain names: no prefix of a wrapper, no unused part.

    A prefix may also be a part of the network (`self.net`): whoever knows its names takes the reading that has them.
    """
    check_names(named, path)
    notes: list[str] = []
    tensors, normalize = _take_normalisation(dict(named), path)
    if normalize is not None:
        notes.append(f"used the file's normalisation layer: mean {normalize[0]}, std {normalize[1]}.")
    tensors = _without_counts(tensors)
    readings = list(_readings(named, None))
    if normalize is not None:
        readings += _readings(tensors, normalize, tuple(notes))
    while True:
        first = {key.partition(".")[0] for key in tensors}
        if first == {"model", "attacker"}:  # the robustness library saves the network twice
            tensors = {key: tensor for key, tensor in tensors.items() if key.startswith("model.")}
            notes.append("left out attacker.*: a second copy of the network.")
        elif len(first) == 1 and all(key.count(".") >= 2 for key in tensors if not key.endswith("num_batches_tracked")):
            (prefix,) = first
            tensors = {key.removeprefix(f"{prefix}."): tensor for key, tensor in tensors.items()}
            notes.append(_removed(prefix))
        else:
            break
    unused = [key for key in tensors if key.startswith("sub_block1.")]
    if unused:
        tensors = {key: tensor for key, tensor in tensors.items() if key not in unused}
        notes.append(f"left out sub_block1 ({len(unused)} tensors): the published WRN creates it and never uses it.")
    numbers = _as_numbers(tensors, path)
    readings.append(Reading(numbers, normalize, tuple(notes)))
    return ForeignCheckpoint(numbers, normalize, notes=tuple(notes), readings=tuple(readings))


def _readings(
    named: Mapping[str, Tensor], normalize: tuple[list[float], list[float]] | None, notes: tuple[str, ...] = ()
) -> Iterator[Reading]:
    """The tensors under their own names, then without each prefix that all of them share."""
    yield Reading(dict(named), normalize, notes)
    tensors = _without_counts(named)
    if len(tensors) < len(named):
        yield Reading(tensors, normalize, notes)
    while len({key.partition(".")[0] for key in tensors}) == 1 and all("." in key for key in tensors):
        prefix = next(iter(tensors)).partition(".")[0]
        tensors = {key.partition(".")[2]: tensor for key, tensor in tensors.items()}
        notes = (*notes, _removed(prefix))
        yield Reading(tensors, normalize, notes)


def _without_counts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors but for the counters of averaged models."""
    return {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[2] != "n_averaged"}


def _removed(prefix: str) -> str:
    return f"removed the prefix {prefix!r} from every key."


def refuse_impostor(path: Path) -> None:
    """Refuse a file that is not a checkpoint: empty, an image, a web page, a Git LFS pointer, other text."""
    require_regular(path)
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
    if is_image(head):
        raise UserError(
            f"{path} is an image, not a checkpoint. Give a run folder or a .safetensors, .pt, .pth or .pth.tar file."
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


def is_image(head: bytes) -> bool:
    """Whether a file that begins so is a PNG, JPEG, GIF, BMP or WebP."""
    if head[8:9] == b"{":  # safetensors, after a length that may spell "BM"
        return False
    if head.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")):
        return True
    return (head[:2] == b"BM" and head[6:10] == bytes(4)) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def check_names(tensors: Iterable[str], path: Path) -> None:
    """Refuse names of tensors that no network has: messages of one line repeat them."""
    for name in tensors:
        if not name.isprintable() or len(name) > _LONGEST:
            raise UserError(
                f"{path} holds a tensor with the name {shown(name)}, which no network has. Use another file."
            )


def _open(path: Path) -> TorchFile:
    try:
        return torch_file.read(path)
    except Exception as error:  # a damaged or malicious pickle can fail anywhere; none of its code has run
        raise UserError(f"{path} {_complaint(path, error)}") from None


def _numbers(file: TorchFile, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    check_names(stored, file.path)
    try:
        return file.tensors(stored)
    except zipfile.BadZipFile:
        raise UserError(
            f"{file.path} is damaged: its numbers do not match their CRC-32. Copy or download it again."
        ) from None
    except Exception as error:
        raise UserError(f"{file.path} {_complaint(file.path, error)}") from None


def _complaint(path: Path, error: Exception) -> str:
    """Why a file could not be read, and the fix."""
    if isinstance(error, ForbiddenName):
        name = shown(str(error.name))
        return f"was refused: it holds a pickled object ({name}) that could run code when read. {_FIX}"
    if isinstance(error, NotReadable):
        return f"{error} {_FIX}" if "TorchScript" in str(error) else str(error)
    with path.open("rb") as file:
        head = file.read(512)
    if head[257:262] == b"ustar":
        return f"is a tar archive. Unpack it first; if it is a checkpoint of torch 0.1: {_FIX}"
    if head[:2] in (b"\x1f\x8b", b"BZ"):
        return "is a compressed archive. Unpack it first."
    if head[:2] == b"PK" and not _has_an_end(path):
        return "is truncated: a zip archive without its end. Copy or download it again."
    if head and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return "is a text file, not a checkpoint. Give the file that torch.save wrote."
    reason = shown(re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__, 120).rstrip(".")
    return f"is not a complete checkpoint of torch.save ({reason}). Copy it again, or use another."


def _has_an_end(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # an end that speaks of other disks
        return True


def _find(content: Any, path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """The mapping that holds the weights, at any level of nesting."""
    found: dict[tuple[str, ...], dict[str, StoredTensor | OtherTensor]] = {}
    visited = 0
    for place, tensors in _weights_in(content, ()):
        visited += 1 if tensors is None else 0
        if visited > _VISITED:
            raise UserError(f"{path} holds more than {_VISITED:,} entries around its weights. {_FIX}")
        if tensors is not None:
            found[place] = tensors
    if not found:
        kind = _described(content)
        raise UserError(f"{path} holds no weights of a network: it is {kind}. {_FIX}")
    named = [place for nest in NESTS for place in found if place[-1:] == (nest,)]
    place = () if () in found else next(iter(named or found))
    others = [".".join(other) for other in found if other != place]
    if others and not named and place:
        raise UserError(f"{path} holds several networks ({_listed(['.'.join(p) for p in found])}). Save one alone.")
    notes = [f"read the weights under {'.'.join(place)!r}."] if place else []
    if others:
        notes.append(f"other weights in the file were not read: {_listed(others)}.")
    dense: dict[str, StoredTensor] = {}
    for key, tensor in found[place].items():
        if isinstance(tensor, OtherTensor):
            raise _not_dense(path, key)
        dense[key] = tensor
    return dense, notes


def _described(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"a dictionary of {_listed(list(content))}"
    return "Tensor" if torch_file.tensor(content) is not None else type(content).__name__


def _weights_in(
    content: Any, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, StoredTensor | OtherTensor] | None]]:
    """(place, tensors) of every network, and (place, None) for every entry on the way."""
    inside: Iterator[tuple[Any, Any]]
    if isinstance(content, Mapping):
        inside = iter(content.items())
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        inside = iter(enumerate(content))
    else:
        return
    tensors: dict[str, StoredTensor | OtherTensor] = {}
    deeper: list[tuple[str, Any]] = []
    for key, value in inside:
        yield place, None
        if isinstance(key, str | int):
            if (tensor := torch_file.tensor(value)) is not None:
                tensors[str(key)] = tensor
            elif len(place) < _DEPTH and not re.match("optim|sched|scaler", str(key)):
                deeper.append((str(key), value))
    # A network has weights; moments of an optimiser or statistics do not.
    if any(key.endswith("weight") for key in tensors):
        yield place, tensors
    for key, value in deeper:
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
            raise _not_dense(path, key)
        numbers[key] = tensor.detach().to(torch.float32) if tensor.is_floating_point() else tensor.detach()
        if not math.isfinite(numbers[key].sum(dtype=torch.float64).item()):  # NaN and infinity survive a sum
            raise UserError(
                f"{path}: {shown(key)} holds numbers that are not finite: the training diverged. Use another file."
            )
    return numbers


def _not_dense(path: Path, key: str) -> UserError:
    return UserError(f"{path}: {shown(key)} is not a dense tensor of real numbers. Save the weights dense, in float32.")


def _listed(names: Sequence[object], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(repr(name)) for name in names[:most]) + more
