"""How far an attack mixes the classes, measured by the classes of each point's nearest neighbours.

If two classes swap places, the attacked points by themselves are not mixed. Together with the natural points, which a
model has to fit as well (paper Sec. 1), they are. So attacked points are compared with natural ones too. Neighbours are
the k nearest in Euclidean distance.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixing(points: Tensor, y: Tensor, natural: Tensor, k: int) -> dict[str, float]:
    """Three fractions. Row i of `points` was made from row i of `natural`, which does not count as its neighbour.

    purity: a point's neighbours in its own set that have its class (mean over points).
    foreign: a point's natural neighbours that have another class (mean over points).
    amidst: points without a natural neighbour of their own class.
    """
    own, across = _strangers(points, y, points, k), _strangers(points, y, natural, k)
    return {
        "purity": 1.0 - float(own.double().mean()),
        "foreign": float(across.double().mean()),
        "amidst": float(across.all(dim=1).double().mean()),
    }


def _strangers(points: Tensor, y: Tensor, among: Tensor, k: int) -> Tensor:
    """(n, k), bool: whether each of a point's k nearest neighbours has another class."""
    distance = torch.cdist(points.flatten(1).double(), among.flatten(1).double())
    distance.fill_diagonal_(float("inf"))
    nearest = distance.topk(min(k, len(y) - 1), largest=False).indices
    return y[nearest] != y[:, None]
