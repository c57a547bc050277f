"""Weights to begin from: those of another run or file, put into a network before its first step.

A head for another number of classes is left as it was initialised; any other difference is refused by its keys. Knows
no file: `weights.initial` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparring.errors import UserError
from sparring.models.keys import in_words, problems, shapes_of, wrong_kinds
from sparring.training.checkpoint import checksum

_MEAN = "normalize.mean"


@dataclass(frozen=True)
class Initial:
    """Weights by name, and where they came from."""

    source: str  # as the caller named it
    candidates: tuple[Mapping[str, Tensor], ...]  # the same weights under the file's names, or plainer ones

    @property
    def digest(self) -> str:
        """Tells other weights apart, wherever they lie."""
        return checksum(self.candidates[0])


def begin_from(initial: Initial, model: nn.Module, num_classes: int) -> str:
    """Copy the weights into a model and return what was not copied, in words; "" where all were."""
    wanted = model.state_dict()
    given = max(initial.candidates, key=lambda tensors: len(tensors.keys() & wanted.keys()))
    if _MEAN in given and _MEAN not in wanted:
        raise UserError(f"the network of {initial.source} normalises its images. Add --normalize (normalize=True).")
    if _MEAN in wanted and _MEAN not in given:
        raise UserError(f"the network of {initial.source} does not normalise its images. Leave out --normalize.")
    # Files of torch before 0.4.1 have no counters of batches.
    counters = {key: value for key, value in wanted.items() if key.endswith("num_batches_tracked") and key not in given}
    head = _head(given, wanted, num_classes)
    kept = {key: tensor for key, tensor in {**given, **counters}.items() if key not in head}
    shapes = {key: shape for key, shape in shapes_of(wanted).items() if key not in head}
    wrong = in_words([*problems(kept, shapes), *wrong_kinds(kept, wanted)])
    if wrong:
        raise UserError(f"the weights of {initial.source} are not those of {type(model).__name__}. {wrong}")
    with torch.no_grad():
        model.load_state_dict(kept, strict=False)
    if not head:
        return ""
    before = len(given[head[0]])
    return f"begins from {initial.source} with a new head ({', '.join(head)}: {before} -> {num_classes} classes)."


def _head(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], num_classes: int) -> list[str]:
    """The tensors that have one row per class in both, for another number of classes."""
    rows = {
        key: len(given[key])
        for key, tensor in wanted.items()
        if key in given
        and tensor.ndim == given[key].ndim > 0
        and tensor.shape[1:] == given[key].shape[1:]
        and len(tensor) == num_classes != len(given[key])
    }
    return list(rows) if len(set(rows.values())) == 1 else []
