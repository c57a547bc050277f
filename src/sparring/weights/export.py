"""Export a model for other code: weights, a program (.pt2, ONNX), or a folder for a model hub.

`safetensors` also writes a plain state_dict with the key names of the published WRN and CIFAR ResNet, so that their
classes load it. What is known of the model (architecture, classes, threat, measured accuracies) goes into every format.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from sparring._version import __version__
from sparring.errors import UserError, unknown
from sparring.files.leftovers import sweep, target
from sparring.models import built_in
from sparring.models.own import PARAMETERS
from sparring.training import checkpoint, run_folder
from sparring.weights import measured, programs
from sparring.weights.load import HUB_CONFIG, HUB_WEIGHTS, Which, load, locate
from sparring.weights.model_card import model_card

Format = Literal["safetensors", "pt2", "onnx", "hub"]
FORMATS: tuple[str, ...] = get_args(Format)
_CARD = "README.md"
_DEFAULT = Path("export")


@dataclass(frozen=True)
class Exported:
    """The files of an export, and what their user must know."""

    format: Format
    path: Path  # what to load: a file, or the folder of a hub
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    @property
    def safetensors(self) -> Path:
        """The .safetensors file."""
        return self._ending(".safetensors")

    @property
    def state_dict(self) -> Path:
        """The .pt file, a plain state_dict."""
        return self._ending(".pt")

    def _ending(self, suffix: str) -> Path:
        for file in self.files:
            if file.suffix == suffix:
                return file
        raise UserError(f"an export as {self.format} writes no {suffix} file. It wrote {self.path}.")


def export(
    path: Path | str,
    out: Path | str | None = None,
    *,
    format: Format = "safetensors",
    which: Which = "last",
    sub_block1: bool = False,
    model: str | nn.Module | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
) -> Exported:
    """Write a model in a format that other code reads.

    safetensors: NAME.safetensors, with the architecture in its metadata, and NAME.pt, a plain state_dict. pt2 and onnx:
    a program from `pixels` in [0, 1] to `logits` for any batch size. hub: a folder with model.safetensors, config.json
    and README.md, a model card.

    Args:
        path: a run folder, a shipped model's name, or any file that `load` reads without further arguments.
        out: the folder to write to, created if absent, or a file with the format's suffix; of a hub the folder itself.
        format: "safetensors", "pt2", "onnx" or "hub".
        which: the checkpoint of a run folder.
        sub_block1: also write the sub_block1 that TRADES' WRN class has and never uses, so that strict=True works.
        model: the network, where it is the caller's own or cannot be identified, as `load_model` takes it.
        num_classes: with `channels` and `size`, what the network was made for, as `load_model` takes them.
        channels: the colour channels.
        size: (height, width) of its images.
    """
    if format not in FORMATS:
        raise unknown("format", str(format), FORMATS)
    if not isinstance(path, str | Path):
        raise UserError(
            f"export takes the path of a run folder or a file, got {type(path).__name__}. Give the run that the "
            "model is from, for example 'runs/a'; where the network is your own, also model=net."
        )
    source = locate(Path(path), which)
    loaded = load(path, which=which, model=model, num_classes=num_classes, channels=channels, size=size)
    facts, notes = described(loaded.facts, source)
    if format != "safetensors":
        _refuse_unknown_sizes(source, facts, format)
    named = _name(Path(path).expanduser(), source)
    folder, name = _place(Path(out).expanduser() if out is not None else None, named, format)
    made = [folder / file for file in _files(name, format)]
    if source.resolve() in [file.resolve() for file in made]:
        raise UserError(f"the export would overwrite {source}, which it reads. Choose another folder with --out.")
    sweep(folder, [file.name for file in made].__contains__)
    if format == "hub":
        _refuse_another(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder}: {error.strerror}. Choose another with --out.") from None
    if format == "safetensors":
        notes += _write_weights(made[0], made[1], loaded.model, facts, sub_block1=sub_block1)
    elif format == "hub":
        _write_hub(folder, name, loaded.model, facts)
    else:
        write = programs.write_pt2 if format == "pt2" else programs.write_onnx
        write(made[0], loaded.model, facts)
    return Exported(format, folder if format == "hub" else made[0], tuple(made), tuple(notes))


def described(facts: Mapping[str, Any], source: Path) -> tuple[dict[str, Any], list[str]]:
    """What a checkpoint records, with the threat and the measurements that its run folder adds, and notes on these."""
    if source.name not in (run_folder.LAST, run_folder.BEST):
        return measured.trusted(facts, source)
    threat = measured.threat(source.parent)
    records, notes = measured.records(source.parent, which=source.stem, epoch=facts.get("epoch"))
    more = {"threat": threat, "measured": records}
    return {**facts, **{key: value for key, value in more.items() if value}}, notes


def _name(path: Path, source: Path) -> str:
    """RUN-last of a run, FOLDER of an exported folder, else the file's name without its suffix."""
    if not path.is_dir():
        return _stem(source)
    return path.resolve().name if source.name == HUB_WEIGHTS else f"{path.resolve().name}-{source.stem}"


def _place(out: Path | None, name: str, format: Format) -> tuple[Path, str]:
    """The folder to write to, and the name of the files in it."""
    if format == "hub":
        return (_DEFAULT / name if out is None else out), (name if out is None else out.resolve().name)
    if out is None or out.suffix not in [f".{other}" for other in FORMATS]:
        return out or _DEFAULT, name
    if out.suffix != f".{format}":
        raise UserError(f"{format} writes a .{format} file, got --out {out}. Add --format {out.suffix[1:]}.")
    return out.parent, out.stem


def _files(name: str, format: Format) -> tuple[str, ...]:
    if format == "hub":
        return HUB_WEIGHTS, HUB_CONFIG, _CARD
    return (f"{name}.safetensors", f"{name}.pt") if format == "safetensors" else (f"{name}.{format}",)


def _refuse_unknown_sizes(source: Path, facts: Mapping[str, Any], format: Format) -> None:
    """Refuse a network of the caller's own whose file does not say what it is made for."""
    unknown = [key for key in PARAMETERS if facts["model"].get(key) is None]
    if unknown:
        raise UserError(
            f"{source} does not record {', '.join(unknown)}, which {format} needs. Give its data set (--data "
            f"digits), in Python {'=, '.join(unknown)}=."
        )


def _refuse_another(folder: Path) -> None:
    """Refuse a folder with other content: config.json and README.md are names that others have too."""
    own = (HUB_WEIGHTS, HUB_CONFIG, _CARD)  # half-written ones are those of an export that was killed
    others = folder.is_dir() and any((target(path) or ("",))[0] not in own for path in folder.iterdir())
    if others and not (folder / HUB_WEIGHTS).is_file():
        raise UserError(f"{folder} holds other files, and config.json or README.md might be replaced. Choose another.")


def _write_weights(
    weights: Path, published_at: Path, model: nn.Module, facts: Mapping[str, Any], *, sub_block1: bool
) -> list[str]:
    state = {key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}
    checkpoint.save(weights, state, facts)
    notes: list[str] = []
    own = not built_in(facts["model"]["name"])  # then the keys are those of the user's own class
    published = {key: tensor.contiguous() for key, tensor in state.items() if own or not key.startswith("normalize.")}
    if len(published) < len(state) and facts["model"].get("normalize"):
        mean, std = facts["model"]["normalize"]
        notes.append(
            f"{published_at.name} has no normalisation layer, as in the published code: "
            f"pass (x - mean) / std to the network, with mean {mean}, std {std}."
        )
    if facts["model"]["name"].startswith("wrn-"):
        if sub_block1:
            published.update({f"sub_{key}": tensor for key, tensor in published.items() if key.startswith("block1.")})
        else:
            notes.append(
                "a WRN class with an unused sub_block1 (TRADES) needs strict=False, or an export with --sub-block1."
            )
    written = io.BytesIO()  # torch's own file writer reports a full disk as an internal RuntimeError
    torch.save(published, written)
    with checkpoint.replacing(published_at) as temporary:
        temporary.write_bytes(written.getbuffer())
    return notes


def _write_hub(folder: Path, name: str, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """The weights, with their facts as ever; the same facts as JSON; the card."""
    state = {key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}
    shown = dict(facts)
    if isinstance(shown.get("data"), str):  # the folder is to be published
        shown["data"] = measured.public(shown["data"])
    checkpoint.save(folder / HUB_WEIGHTS, state, shown)
    checkpoint.write_text(folder / HUB_CONFIG, json.dumps({**shown, "sparring": __version__}, indent=2) + "\n")
    checkpoint.write_text(folder / _CARD, model_card(name, shown))


def _stem(path: Path) -> str:
    """The file's name without .safetensors, .pt, .pth or .pth.tar."""
    return re.sub(r"(\.pth\.tar|\.[A-Za-z0-9]+)$", "", path.name) or path.name
