"""The queries of AutoAttack's Square in the L-infinity norm, with few synchronizations.

pyautoattack builds whole images for every query and asks the device several times where the square lies and which
images are left. Here only the square is written, and taken back where it does not help. Random numbers are drawn as the
package draws them, so the same points come out up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_DRAWN = 250  # squares at a time
# Queries between two looks at how many images are left, and the share of them at which the others leave the batch. On a
# GPU a look waits, and every size of a batch has its cost.
_ON_GPU, _ON_CPU = (20, 15 / 16), (1, 1.0)


def fits(square: Any) -> bool:
    """Whether these settings of the package's attack are those that `run` knows."""
    return bool(square.norm == "Linf" and square.loss == "margin" and not square.targeted and not square.return_all)


@torch.no_grad()
def run(square: Any, x: Tensor, y: Tensor) -> tuple[None, Tensor]:
    """In place of the package's `attack_single_run`, with its settings: the points with the lowest margins.

    Args:
        square: the package's attack.
        x: (n, channels, height, width), in [0, 1], which the model gets right.
        y: (n,), int64.
    """
    best = (x + square.eps * square.random_choice([*x.shape[:2], 1, x.shape[3]])).clamp(0, 1)
    lowest = _margins(square.predict, best, y)
    rows = torch.nonzero(lowest > 0)[:, 0]
    natural, labels, tried, lowest = x[rows], y[rows], best[rows], lowest[rows]
    look, share = _ON_GPU if x.is_cuda else _ON_CPU
    for number, (size, top, left, change) in enumerate(_squares(square, x)):
        if number % look == 0:
            still = torch.nonzero(lowest > 0)[:, 0]
            if len(still) <= share * len(lowest) and len(still) < len(lowest):
                best[rows] = tried
                rows, natural, labels = rows[still], natural[still], labels[still]
                tried, lowest = tried[still], lowest[still]
            if len(rows) == 0:
                break
        here = (..., slice(top, top + size), slice(left, left + size))
        before, around = tried[here].clone(), natural[here]
        tried[here] = (before + change).maximum(around - square.eps).minimum(around + square.eps).clamp(0, 1)
        margins = _margins(square.predict, tried, labels)
        better = (margins < lowest) & (lowest > 0)
        tried[here] = torch.where(better[:, None, None, None], tried[here], before)
        lowest = torch.where(better, margins, lowest)
    best[rows] = tried
    return None, best


def _squares(square: Any, x: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
    """The size, place and change of every query's square."""
    channels, height, width = x.shape[1:]
    pixels = channels * height * width
    for start in range(0, square.n_queries, _DRAWN):
        places, signs = [], []
        for number in range(start, min(start + _DRAWN, square.n_queries)):
            side = round(math.sqrt(square.p_selection(number) * pixels / channels))
            size = min(max(side, 1), height, width)
            top, left = (int((room - size) * torch.rand(1)) for room in (height, width))
            places.append((size, top, left))
            signs.append(torch.sign(2 * torch.rand(channels, 1, 1) - 1))
        changes = 2 * square.eps * torch.stack(signs).to(x.device)
        yield from ((*place, change) for place, change in zip(places, changes, strict=True))


def _margins(predict: Any, x: Tensor, y: Tensor) -> Tensor:
    """By how much the logit of its class is the largest of each image."""
    logits: Tensor = predict(x.clone())  # a model may write into what it is given
    own = logits.gather(1, y[:, None])
    return (own - logits.scatter(1, y[:, None], -math.inf).amax(1, keepdim=True))[:, 0]
