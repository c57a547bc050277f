"""Models from files: a run folder, our .safetensors, or a published .pt, .pth or .pth.tar; and back, for peers.

Our files describe themselves; others are read by `published` and their architecture is found by `recognise`. A mismatch
names the keys and the nearest architecture. Loading runs nothing from the file and leaves the global random state
alone. Knows neither data nor attacks.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparring.errors import UserError, did_you_mean
from sparring.training import checkpoint
from sparring.weights import foreign, identify
from sparring.weights.identify import Identified, Normalisation

Which = Literal["best", "last"]
_log = logging.getLogger("sparring")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".tar", ".ckpt", ".bin")


@dataclass(frozen=True)
class Loaded:
    """A model, and what its file says about it."""

    model: nn.Module
    facts: dict[str, Any]  # at least "model"; of our own files also "data", "epoch", ...
    notes: tuple[str, ...]  # what was done to a foreign file to read it, a sentence each


@dataclass(frozen=True)
class Exported:
    """Where an export went, and what its reader must know."""

    safetensors: Path
    state_dict: Path
    notes: tuple[str, ...]

    @property
    def files(self) -> list[Path]:
        """Both files."""
        return [self.safetensors, self.state_dict]


@dataclass(frozen=True)
class _File:
    """Plain tensors and what is known about them."""

    path: Path
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    normalize: Normalisation | None = None
    notes: tuple[str, ...] = ()


def load_model(
    path: Path | str,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
    normalize: Normalisation | None = None,
    which: Which = "last",
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model of a run folder or a checkpoint, from pixels in [0, 1] to logits, in eval mode.

    Its `classes` are the names of the classes in the order of the logits; () where the file does not know them.

    Args:
        path: a run folder, a .safetensors file, or a published .pt, .pth or .pth.tar.
        model: its architecture, where the file neither says nor shows it.
        num_classes: likewise; read off the last layer where not given.
        channels: likewise; read off the first layer where not given.
        size: (height, width) of its images; matters only to networks whose dense layer depends on it.
        normalize: (mean, std) per channel that the network was trained with, where the file has no such layer.
        which: the checkpoint of a run folder: "last", or "best" on the held-out images.
        device: where the model shall live.
    """
    loaded = load(
        path,
        model=model,
        num_classes=num_classes,
        channels=channels,
        size=size,
        normalize=normalize,
        which=which,
        device=device,
    )
    for note in loaded.notes:
        _log.info("%s: %s", path, note)
    names = loaded.facts.get("model", {}).get("classes", ())
    loaded.model.classes = tuple(names)  # type: ignore[assignment]
    return loaded.model


def load(
    path: Path | str,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
    normalize: Normalisation | None = None,
    which: Which = "last",
    device: torch.device | str = "cpu",
) -> Loaded:
    """As `load_model`, together with the facts of the file and notes on how it was read."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        raise UserError(f"there is no device {str(device)!r} here. Use device='cpu'.") from None
    file = _read(_locate(Path(path), which))
    told = _told(file)
    given = {"name": model, "num_classes": num_classes, "channels": channels, "size": size}
    network = _network(file, {**told, **{key: value for key, value in given.items() if value is not None}})
    normalize = _agreed(file.path, told.get("normalize") or file.normalize, normalize)
    if normalize is not None and all(len(part) == 1 for part in normalize):  # one number for all channels
        normalize = (list(normalize[0]) * network.channels, list(normalize[1]) * network.channels)
    network = replace(network, normalize=normalize)

    net = network.build()
    state = {}
    for key, tensor in net.state_dict().items():
        if key in file.tensors and file.tensors[key].numel() == tensor.numel():
            state[key] = file.tensors[key].reshape(tensor.shape)
        elif key.endswith("num_batches_tracked"):  # torch before 0.4.1 saved none; eval mode does not read it
            state[key] = torch.zeros_like(tensor, device="cpu")
    if normalize is not None:
        mean, std = (torch.tensor(part, dtype=torch.float32).view(1, -1, 1, 1) for part in normalize)
        state |= {"normalize.mean": mean, "normalize.std": std}
    net.to_empty(device=device).load_state_dict(state, strict=True)
    notes = list(file.notes)
    if normalize is None and "model" not in file.facts:
        notes.append("no normalisation: if it was trained on normalised images, give their mean and std.")
    told_of_itself = file.facts.get("model")
    names = told_of_itself.get("classes") if isinstance(told_of_itself, dict) else None
    described = {**network.facts(), **({"classes": names} if isinstance(names, list) else {})}
    return Loaded(net.eval(), {**file.facts, "model": described}, tuple(notes))


def facts(path: Path | str, *, which: Which = "last") -> dict[str, Any]:
    """What a file says about itself (model, data, epoch, ...), or {} where it says nothing."""
    return _read(_locate(Path(path), which)).facts


def export(path: Path | str, out: Path | str, *, which: Which = "last", sub_block1: bool = False) -> Exported:
    """Write NAME.safetensors, which describes itself, and NAME.pt, a plain state_dict with the peers' key names.

    Args:
        path: a run folder, or any file that `load` reads by itself.
        out: the folder to write to, made if absent.
        which: the checkpoint of a run folder.
        sub_block1: also write the part that TRADES' WRN class makes and never uses, so that it loads strictly.
    """
    source = _locate(Path(path), which)
    loaded = load(source)
    run = Path(path).expanduser()
    name = f"{run.resolve().name}-{which}" if run.is_dir() else _stem(source)
    folder = Path(out).expanduser()
    targets = [folder / f"{name}.safetensors", folder / f"{name}.pt"]
    if source.resolve() in [target.resolve() for target in targets]:
        raise UserError(f"the export would overwrite {source}, which it reads. Choose another folder with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}. Choose another with --out.") from None

    state = {key: tensor.detach().cpu() for key, tensor in loaded.model.state_dict().items()}
    checkpoint.save(targets[0], state, loaded.facts)
    notes: list[str] = []
    theirs = {key: tensor.contiguous() for key, tensor in state.items() if not key.startswith("normalize.")}
    if len(theirs) < len(state):
        mean, std = loaded.facts["model"]["normalize"]
        notes.append(
            f"{targets[1].name} is without the normalisation layer, which peers' networks do not have: "
            f"give theirs (x - mean) / std with mean {mean}, std {std}."
        )
    if loaded.facts["model"]["name"].startswith("wrn-"):
        if sub_block1:
            theirs.update({f"sub_{key}": tensor for key, tensor in theirs.items() if key.startswith("block1.")})
        else:
            notes.append(
                "a WRN class with an unused sub_block1 (TRADES) wants strict=False, or an export with --sub-block1."
            )
    written = io.BytesIO()  # torch's own file writer tells a full disk by a RuntimeError of its internals
    torch.save(theirs, written)
    with checkpoint.replacing(targets[1]) as temporary:
        temporary.write_bytes(written.getbuffer())
    return Exported(targets[0], targets[1], tuple(notes))


def _locate(path: Path, which: str) -> Path:
    """The checkpoint file that a path means."""
    path = path.expanduser()
    if which not in ("best", "last"):
        raise UserError(f"which must be 'best' or 'last', got {which!r}.")
    if path.is_dir():
        chosen = path / f"{which}.safetensors"
        if chosen.is_file():
            return chosen
        there = [w for w in ("best", "last") if (path / f"{w}.safetensors").is_file()]
        if there:
            raise UserError(f"the run {path} has no {which} checkpoint, only {there[0]!r}. Ask for which={there[0]!r}.")
        if (path / "config.json").is_file():
            raise UserError(f"the run {path} has saved no checkpoint yet. Let it finish an epoch, or give another.")
        files = sorted(file.name for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        hint = f" It holds {', '.join(files[:3])}: give one of these." if files else " Give a run folder or a file."
        raise UserError(f"{path} is not a run folder: it holds no {which}.safetensors.{hint}")
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) or " Check the path."
        raise UserError(f"there is no checkpoint at {path}.{hint}")
    return path


def _read(path: Path) -> _File:
    """Tensors and facts of any file; nothing of it is run."""
    foreign.refuse_impostor(path)
    with path.open("rb") as opened:
        head = opened.read(9)
    if path.suffix != ".safetensors" and head[8:] != b"{":  # safetensors: eight bytes of length, then JSON
        theirs = foreign.read(path)
    else:
        ours = checkpoint.load(path)
        if "model" in ours.facts:
            # A training checkpoint also holds momentum and the like; an exported file holds the network alone.
            tensors = ours.part("model") or ours.tensors
            inside = [tensors[key].flatten().tolist() for key in ("normalize.mean", "normalize.std") if key in tensors]
            return _File(path, tensors, ours.facts, (inside[0], inside[1]) if len(inside) == 2 else None)
        theirs = replace(foreign.plain(ours.tensors, path), facts=ours.facts)
    return _File(path, theirs.tensors, theirs.facts, theirs.normalize, theirs.notes)


def _told(file: _File) -> dict[str, Any]:
    """What the file itself says about its network."""
    told = file.facts.get("model", {})
    if not isinstance(told, dict) or (told and not isinstance(told.get("name"), str)):
        raise UserError(f"{file.path} describes its model as {told!r}, without a name. Give model= and num_classes=.")
    told = {key: told[key] for key in ("name", "num_classes", "channels", "size", "normalize") if told.get(key)}
    if isinstance(told.get("size"), list):
        told["size"] = tuple(told["size"])
    return told


def _agreed(path: Path, inside: Normalisation | None, given: Normalisation | None) -> Normalisation | None:
    """The normalisation of the file or of the caller; two that differ are refused."""
    if given is not None and (len(given) != 2 or len(given[0]) != len(given[1])):
        raise UserError(f"normalize must be (mean, std), one number per channel in each, got {given!r}.")
    if inside is None:
        return given
    if given is not None:
        same = len(given[0]) == len(inside[0]) and all(
            abs(a - b) < 1e-4
            for ours, theirs in zip(given, inside, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
        if not same:
            mean, std = ([round(value, 6) for value in part] for part in inside)
            raise UserError(f"{path} normalises by itself, with mean {mean}, std {std}. Leave normalize out.")
    return (inside[0], inside[1])


def _network(file: _File, described: Mapping[str, Any]) -> Identified:
    """The network that the file holds: as described, recognised where not, and refused where it does not fit."""
    name = described.get("name") or identify.name_of(file.tensors)
    if name is None:
        closest, _ = identify.nearest(file.tensors)
        missing = identify.differences(file.tensors, identify.read_off(closest, file.tensors).shapes())
        raise UserError(
            f"{file.path} is no architecture known here. {identify.advice(file.tensors)} {missing} A model of your "
            "own is measured in Python: sparring.evaluate(model, x, y)."
        )
    known = {key: described[key] for key in ("num_classes", "channels", "size") if key in described}
    network = identify.read_off(name, file.tensors, **known)
    shapes = network.shapes()
    if not identify.fits(file.tensors, shapes):
        raise UserError(
            f"{file.path} does not fit {name!r} with {network.num_classes} classes. "
            f"{identify.differences(file.tensors, shapes)} {identify.advice(file.tensors)}"
        )
    return network


def _stem(path: Path) -> str:
    """The file's name without .safetensors, .pt, .pth or .pth.tar."""
    return re.sub(r"(\.pth\.tar|\.[A-Za-z0-9]+)$", "", path.name) or path.name
