"""Load models from files: a run folder, an exported one, Sparring's .safetensors, or a published .pt or .pth.tar.

Sparring's own files record their architecture; others are read by `foreign`, and `identify` finds their architecture. A
mismatch names the keys and the nearest architecture. Loading runs no code from the file and leaves the global random
state unchanged. Knows neither data nor attacks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparring import models
from sparring.errors import UserError, did_you_mean
from sparring.files.json_text import Damaged, read_json
from sparring.files.regular import require_regular
from sparring.files.schema import anything, fields
from sparring.models.keys import in_words, masks, not_finite, problems, shapes_of, wrong_kinds
from sparring.models.own import Make, call, copied, own_name, unnamed
from sparring.training import checkpoint, run_folder
from sparring.training.schemas import MODEL
from sparring.weights import foreign, identify, shipped
from sparring.weights.identify import Identified, Normalisation

Which = Literal["best", "last"]
_log = logging.getLogger("sparring")
HUB_WEIGHTS, HUB_CONFIG = "model.safetensors", "config.json"  # the names in a folder for a model hub
_CONFIG = 2**20  # bytes of config.json: with the names of 1,000 classes it has 20 kB
_SUFFIXES = (".safetensors", ".pt", ".pth", ".tar", ".ckpt", ".bin")


@dataclass(frozen=True)
class Loaded:
    """A model, and what its file records about it."""

    model: nn.Module
    facts: dict[str, Any]  # at least "model"; Sparring's own files also have "data", "epoch", ...
    notes: tuple[str, ...]  # how a foreign file was read, one sentence each


@dataclass(frozen=True)
class _File:
    """The tensors of a file, and what is known about them."""

    path: Path
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    normalize: Normalisation | None = None
    notes: tuple[str, ...] = ()
    readings: tuple[foreign.Reading, ...] = ()  # of a foreign file: the tensors under its own names, and shorter ones


def load_model(
    path: Path | str,
    *,
    model: str | nn.Module | Make | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
    normalize: Normalisation | None = None,
    which: Which = "last",
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model of a run folder or a checkpoint, from pixels in [0, 1] to logits, in eval mode.

    Its `classes` are the names of the classes in the order of the logits; () where the file does not record them.

    Args:
        path: a run folder, an exported folder, a .safetensors file, a published .pt, .pth or .pth.tar, or the name of a
            model that ships with Sparring ("fat-digits"). A file or folder of that name comes first.
        model: the network, where it is the caller's own: a module (a copy is loaded), what makes it, its
            registered name, or package.module:make. Else the architecture, where it can be neither read nor identified.
        num_classes: the number of classes; that of the last layer unless given.
        channels: the colour channels; those of the first layer unless given.
        size: (height, width) of its images; matters only to networks whose dense layer depends on it.
        normalize: (mean, std) per channel that the network was trained with, where the file has no such layer.
        which: the checkpoint of a run folder: "last", or "best" on the held-out images.
        device: the device of the model.
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
        _log.log(logging.WARNING if "not finite" in note else logging.INFO, "%s: %s", path, note)
    names = loaded.facts.get("model", {}).get("classes") or ()
    loaded.model.classes = tuple(names)  # type: ignore[assignment]
    return loaded.model


def load(
    path: Path | str,
    *,
    model: str | nn.Module | Make | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
    normalize: Normalisation | None = None,
    which: Which = "last",
    device: torch.device | str = "cpu",
) -> Loaded:
    """As `load_model`, with the facts of the file and notes on how it was read."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        raise UserError(f"there is no device {str(device)!r} here. Use device='cpu'.") from None
    if not isinstance(path, str | Path):
        raise UserError(
            f"load_model takes the path of a run folder or a file, got {type(path).__name__}. Write for example "
            "'runs/a'."
        )
    file = _of_its_run(read(locate(Path(path), which)))
    known = _recorded(file)
    name = known.get("name") if model is None else model
    if name is not None and not (isinstance(name, str) and models.built_in(name)):
        sizes = {"num_classes": num_classes, "channels": channels, "size": size}
        own = {key: value for key, value in sizes.items() if value is not None}
        return _load_own(file, model, {**known, **own}, normalize, device)
    given = {"name": model, "num_classes": num_classes, "channels": channels, "size": size}
    network = _network(file, {**known, **{key: value for key, value in given.items() if value is not None}})
    normalize = _agreed(file.path, known.get("normalize") or file.normalize, normalize)
    if normalize is not None and all(len(part) == 1 for part in normalize):  # one number for all channels
        normalize = (list(normalize[0]) * network.channels, list(normalize[1]) * network.channels)
    network = replace(network, normalize=normalize)

    net = network.build()
    _refuse_kinds(file.path, file.tensors, net.state_dict())
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
    notes = [*file.notes, *_not_finite(net)]
    if normalize is None and "model" not in file.facts:
        notes.append("no normalisation: if it was trained on normalised images, give their mean and std.")
    recorded = file.facts.get("model")
    names = recorded.get("classes") if isinstance(recorded, dict) else None
    described = {**network.facts(), **({"classes": names} if isinstance(names, list) else {})}
    return Loaded(net.eval(), {**file.facts, "model": described}, tuple(notes))


def facts(path: Path | str, *, which: Which = "last") -> dict[str, Any]:
    """What a file records about itself (model, data, epoch, ...), or {} where it records nothing."""
    return read(locate(Path(path), which)).facts


def locate(path: Path, which: str) -> Path:
    """The checkpoint file that a path refers to."""
    path = path.expanduser()
    if which not in ("best", "last"):
        raise UserError(f"which must be 'best' or 'last', got {which!r}.")
    if path.is_dir():
        chosen = path / f"{which}.safetensors"
        if chosen.is_file():
            return chosen
        if (path / HUB_WEIGHTS).is_file():
            return path / HUB_WEIGHTS
        there = [w for w in ("best", "last") if (path / f"{w}.safetensors").is_file()]
        if there:
            other = f"Use which={there[0]!r} (--which {there[0]})."
            raise UserError(f"the run {path} has no {which} checkpoint, only {there[0]!r}. {other}")
        if (path / "config.json").is_file():
            raise UserError(f"the run {path} has saved no checkpoint yet. Let it finish an epoch, or give another run.")
        files = sorted(file.name for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        hint = f" It holds {', '.join(files[:3])}: give one of these." if files else " Give a run folder or a file."
        raise UserError(f"{path} is not a run folder: it holds no {which}.safetensors.{hint}")
    if (own := shipped.find(path)) is not None:
        return own
    if path.is_symlink() and not path.exists():
        require_regular(path)
    if not path.exists():
        siblings = [
            entry.name
            for entry in (path.parent.iterdir() if path.parent.is_dir() else ())
            if entry.is_dir() or entry.name.endswith(_SUFFIXES)
        ]
        hint = did_you_mean(path.name, [*siblings, *shipped.names()]) or (
            f" Check the path. Models that ship with Sparring: {', '.join(shipped.names())}."
        )
        raise UserError(f"there is no checkpoint at {path}.{hint}")
    return path


def _load_own(
    file: _File,
    model: str | nn.Module | Make | None,
    described: Mapping[str, Any],
    normalize: Normalisation | None,
    device: torch.device | str,
) -> Loaded:
    """A network that is not built in: as the caller names it, or as a name that this process knows."""
    sizes = {key: described.get(key) for key in ("num_classes", "channels", "size")}
    if model is not None and not isinstance(model, str) and callable(model):
        name = described.get("name", own_name(model))
        net = copied(model) if isinstance(model, nn.Module) else call(model, name, **sizes)
    else:
        name = str(described.get("name") if model is None else model)
        if model is not None:
            models.name_model(model)  # type: ignore[arg-type]
        elif (error := unnamed(name)) is not None:
            raise UserError(f"{file.path}: {error}")
        with torch.random.fork_rng(devices=[]):
            net = models.build(name, **sizes, pretrained=False)  # type: ignore[arg-type]
    inside = described.get("normalize")
    normalize = _agreed(file.path, inside or file.normalize, normalize)
    channels = sizes["channels"] or (len(normalize[0]) if normalize else 0)
    readings = file.readings or (foreign.Reading(file.tensors, notes=file.notes),)
    behind = models.with_normalisation(net, normalize, channels)
    fitting = [(network, reading) for reading in readings for network in (net, behind) if _fits(network, reading)]
    if not fitting:
        network = behind if inside else net
        wrong = min((list(_differences(network, reading)) for reading in readings), key=len)
        raise UserError(f"{file.path} does not hold the weights of {type(net).__name__} ({name}). {in_words(wrong)}")
    network, reading = fitting[0]
    tensors = reading.tensors
    _refuse_kinds(file.path, tensors, network.state_dict())
    network.load_state_dict(tensors, strict=True)
    if file.normalize is None or reading.normalize is not None:  # else the tensors hold the normalisation
        network = behind
    facts = {**{key: list(value) if key == "size" and value else value for key, value in sizes.items()}, "name": name}
    recorded = file.facts.get("model")
    about = {**(recorded if isinstance(recorded, dict) else {}), "normalize": normalize, **facts}
    return Loaded(network.to(device).eval(), {**file.facts, "model": about}, (*reading.notes, *_not_finite(network)))


def _of_its_run(file: _File) -> _File:
    """The checkpoint of a run, refused where it belongs to another one; with a note where that cannot be known."""
    folder = file.path.parent
    if file.path.name not in (run_folder.LAST, run_folder.BEST) or not (folder / run_folder.CONFIG).exists():
        return file
    try:
        run = run_folder.open_run(folder)
    except UserError as error:
        return replace(file, notes=(*file.notes, str(error)))
    run.check_belongs(file.path.name, file.facts)
    return file


def _not_finite(network: nn.Module) -> list[str]:
    """A note on weights that are NaN or infinite: such a model predicts nothing."""
    wrong = in_words(not_finite(network.state_dict(), masks(network)))
    return [f"the weights are damaged, or their training diverged. {wrong}"] if wrong else []


def _refuse_kinds(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse whole numbers as weights: a damaged header can turn every weight into one without an error."""
    wrong = in_words(wrong_kinds(tensors, state))
    if wrong:
        raise UserError(f"{path} is damaged: its weights are {wrong} Copy it again, or use another.")


def _fits(network: nn.Module, reading: foreign.Reading) -> bool:
    return next(_differences(network, reading), None) is None


def _differences(network: nn.Module, reading: foreign.Reading) -> Iterator[tuple[str, str]]:
    return problems(reading.tensors, shapes_of(network.state_dict()))


def read(path: Path) -> _File:
    """The tensors and facts of any file; no code from it is run."""
    foreign.refuse_impostor(path)
    with path.open("rb") as opened:
        head = opened.read(9)
    if path.suffix != ".safetensors" and head[8:] != b"{":  # safetensors: eight bytes of length, then JSON
        published = foreign.read(path)
    else:
        own = checkpoint.load(path)
        foreign.check_names(own.tensors, path)
        if "model" not in own.facts and path.name == HUB_WEIGHTS:
            own = replace(own, facts=_described_beside(path))
        if "model" in own.facts:
            # A training checkpoint also holds the optimiser's state; an exported file holds the network alone.
            tensors = own.part("model") or own.tensors
            inside = [tensors[key].flatten().tolist() for key in ("normalize.mean", "normalize.std") if key in tensors]
            return _File(path, tensors, own.facts, (inside[0], inside[1]) if len(inside) == 2 else None)
        published = replace(foreign.plain(own.tensors, path), facts=own.facts)
    return _File(path, published.tensors, published.facts, published.normalize, published.notes, published.readings)


def _described_beside(path: Path) -> dict[str, Any]:
    """What config.json says of the weights beside it, where huggingface_hub's mixin wrote both; else {}."""
    beside = path.parent / HUB_CONFIG
    if not beside.exists():
        return {}
    try:
        described = read_json(beside, fields(model=MODEL, others=anything), most=_CONFIG)
    except Damaged:  # or another library's
        return {}
    return {key: described[key] for key in ("model", "threat") if key in described}


def _recorded(file: _File) -> dict[str, Any]:
    """What the file records about its network."""
    model = file.facts.get("model", {})
    if model == {}:
        return {}
    if wrong := MODEL(model):
        raise Damaged(f"{file.path} is damaged: of what it records about its model {wrong}. Use another file.")
    known = {key: model[key] for key in ("name", "num_classes", "channels", "size", "normalize") if model.get(key)}
    if isinstance(known.get("size"), list):
        known["size"] = tuple(known["size"])
    if "normalize" in known and not _is_moments(known["normalize"]):
        raise Damaged(f"{file.path} is damaged: the normalisation it records is no (mean, std). Use another file.")
    return known


def _is_moments(given: object) -> bool:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        return False
    mean, std = given
    if not all(isinstance(part, Sequence) and not isinstance(part, str) for part in (mean, std)):
        return False
    return len(mean) == len(std) and all(isinstance(value, int | float) for value in (*mean, *std))


def _agreed(path: Path, inside: Normalisation | None, given: Normalisation | None) -> Normalisation | None:
    """The normalisation of the file or of the caller; refused where the two differ."""
    if given is not None and not _is_moments(given):
        raise UserError(
            f"normalize must be (mean, std), one number per channel in each, got {given!r}. Write for example "
            "([0.5], [0.25])."
        )
    if inside is None:
        return given
    if given is not None:
        same = len(given[0]) == len(inside[0]) and all(
            abs(a - b) < 1e-4
            for asked, found in zip(given, inside, strict=True)
            for a, b in zip(asked, found, strict=True)
        )
        if not same:
            mean, std = ([round(value, 6) for value in part] for part in inside)
            raise UserError(f"{path} has its own normalisation, mean {mean}, std {std}. Leave normalize out.")
    return (inside[0], inside[1])


def _network(file: _File, described: Mapping[str, Any]) -> Identified:
    """The network in the file: as described, identified where not, and refused where it does not fit."""
    name = described.get("name") or identify.name_of(file.tensors)
    if name is None:
        closest, _ = identify.nearest(file.tensors)
        missing = identify.differences(file.tensors, identify.read_off(closest, file.tensors).shapes())
        raise UserError(
            f"{file.path} has no known architecture. {identify.advice(file.tensors)} {missing} Where the network is "
            "your own, name what makes it: --model package.module:make, in Python model=net."
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
