"""Read the weights that a run begins from: a run folder, a .safetensors or a published file. No code in it is run."""

from __future__ import annotations

from pathlib import Path

import torch

from sparring.errors import UserError
from sparring.training.initial import Initial
from sparring.weights.load import Which, locate, read


def initial(source: Path | str, which: Which = "last") -> Initial:
    """The weights of a run (its last checkpoint; the average, where it keeps one) or of a file, by name."""
    if not isinstance(source, str | Path):
        raise UserError(f"init must be the path of a run or a file, got {type(source).__name__}. Save weights first.")
    file = read(locate(Path(source), which))
    plainer = dict(file.tensors)
    if file.normalize is not None and "normalize.mean" not in plainer:
        mean, std = (torch.tensor(part, dtype=torch.float32).view(1, -1, 1, 1) for part in file.normalize)
        plainer |= {"normalize.mean": mean, "normalize.std": std}
    return Initial(str(source), (plainer, file.named) if file.named else (plainer,))
