"""Numbers for the mixing of classes: who are a point's nearest neighbours?

A swap of two classes is no mixing among the attacked points themselves, but it is among them and the natural ones,
which a model has to fit together (paper Sec. 1). So the attacked points are also held against the natural ones.
Neighbours are the k nearest by Euclidean distance.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixing(points: Tensor, y: Tensor, natural: Tensor, k: int) -> dict[str, float]:
    """Three shares. Row i of `points` was made from row i of `natural`, which does not count as its neighbour.

    purity: of a point's neighbours in its own set, those of its class (the mean over points).
    foreign: of its natural neighbours, those of another class (the mean over points).
    amidst: the points that have no natural neighbour of their own class.
    """
    own, across = _strangers(points, y, points, k), _strangers(points, y, natural, k)
    return {
        "purity": 1.0 - float(own.double().mean()),
        "foreign": float(across.double().mean()),
        "amidst": float(across.all(dim=1).double().mean()),
    }


def _strangers(points: Tensor, y: Tensor, among: Tensor, k: int) -> Tensor:
    """(n, k): whether each of a point's k nearest is of another class."""
    distance = torch.cdist(points.flatten(1).double(), among.flatten(1).double())
    distance.fill_diagonal_(float("inf"))
    nearest = distance.topk(min(k, len(y) - 1), largest=False).indices
    return y[nearest] != y[:, None]
