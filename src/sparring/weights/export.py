"""Export a model for other code: a .safetensors file with its architecture, and a plain state_dict.

The state_dict has the key names of the published WRN and CIFAR ResNet, so that their classes load it.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from sparring.errors import UserError
from sparring.training import checkpoint
from sparring.weights.load import Which, load, locate


@dataclass(frozen=True)
class Exported:
    """The files of an export, and what their user must know."""

    safetensors: Path
    state_dict: Path
    notes: tuple[str, ...]

    @property
    def files(self) -> list[Path]:
        """Both files."""
        return [self.safetensors, self.state_dict]


def export(path: Path | str, out: Path | str, *, which: Which = "last", sub_block1: bool = False) -> Exported:
    """Write NAME.safetensors, with the architecture in its metadata, and NAME.pt, a plain state_dict.

    Args:
        path: a run folder, or any file that `load` reads without further arguments.
        out: the folder to write to, created if absent.
        which: the checkpoint of a run folder.
        sub_block1: also write the sub_block1 that TRADES' WRN class has and never uses, so that strict=True works.
    """
    source = locate(Path(path), which)
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
        raise UserError(f"cannot create the folder {folder}: {error.strerror}. Choose another with --out.") from None

    state = {key: tensor.detach().cpu() for key, tensor in loaded.model.state_dict().items()}
    checkpoint.save(targets[0], state, loaded.facts)
    notes: list[str] = []
    published = {key: tensor.contiguous() for key, tensor in state.items() if not key.startswith("normalize.")}
    if len(published) < len(state):
        mean, std = loaded.facts["model"]["normalize"]
        notes.append(
            f"{targets[1].name} has no normalisation layer, as in the published code: "
            f"pass (x - mean) / std to the network, with mean {mean}, std {std}."
        )
    if loaded.facts["model"]["name"].startswith("wrn-"):
        if sub_block1:
            published.update({f"sub_{key}": tensor for key, tensor in published.items() if key.startswith("block1.")})
        else:
            notes.append(
                "a WRN class with an unused sub_block1 (TRADES) needs strict=False, or an export with --sub-block1."
            )
    written = io.BytesIO()  # torch's own file writer reports a full disk as an internal RuntimeError
    torch.save(published, written)
    with checkpoint.replacing(targets[1]) as temporary:
        temporary.write_bytes(written.getbuffer())
    return Exported(targets[0], targets[1], tuple(notes))


def _stem(path: Path) -> str:
    """The file's name without .safetensors, .pt, .pth or .pth.tar."""
    return re.sub(r"(\.pth\.tar|\.[A-Za-z0-9]+)$", "", path.name) or path.name
