"""Read the weights that a run begins from: a run folder, a .safetensors or a published file. No code in it is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sparring.errors import UserError
from sparring.training.initial import Initial
from sparring.weights.identify import Normalisation
from sparring.weights.load import Which, locate, read


def initial(source: Path | str, which: Which = "last") -> Initial:
    """The weights of a run (its last checkpoint; the average, where it keeps one) or of a file, by name."""
    if not isinstance(source, str | Path):
        raise UserError(f"init must be the path of a run or a file, got {type(source).__name__}. Save weights first.")
    file = read(locate(Path(source), which))
    plainer = _with(file.tensors, file.normalize)
    return Initial(str(source), (plainer, *(_with(reading.tensors, reading.normalize) for reading in file.readings)))


def _with(tensors: Mapping[str, Tensor], normalize: Normalisation | None) -> dict[str, Tensor]:
    """The tensors and those of their normalisation, where that was read from the file."""
    if normalize is None or "normalize.mean" in tensors:
        return dict(tensors)
    mean, std = (torch.tensor(part, dtype=torch.float32).view(1, -1, 1, 1) for part in normalize)
    return {**tensors, "normalize.mean": mean, "normalize.std": std}
