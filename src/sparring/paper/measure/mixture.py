"""Figure 3 and App. C: layer outputs of a naturally trained network on natural, PGD-20 and PGD-20-0 data.

The three sets are projected together, so that their pictures share their axes: by PCA, and by t-SNE. The mixing is
measured in the layer's own space. The images are the first test images of each class (the paper does not name them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.attacks import friendly_pgd, pgd
from sparring.data import Dataset
from sparring.errors import UserError
from sparring.models.features import layers, tap
from sparring.paper.measure.mixing import mixing
from sparring.paper.specs import Mixture

SETS = ("natural", "pgd", "friendly")


def measure(what: Mixture, model: nn.Module, data: Dataset, *, device: torch.device, seed: int) -> dict[str, Any]:
    """The outputs of every layer projected to the plane, and how far the classes are mixed."""
    missing = [number for number in what.layers if number > len(layers(model))]
    if missing:
        raise UserError(
            f"the network has {len(layers(model))} layers, so layer {missing[0]} does not exist. Declare another layer."
        )
    x, y, shown = _images(what, data)
    x, y = x.to(device), y.to(device)
    settings: dict[str, Any] = {"eps": what.eps, "step_size": what.step_size, "steps": what.steps, "start": None}
    found = friendly_pgd(model, x, y, tau=0, **settings)
    sets = {"natural": x, "pgd": pgd(model, x, y, **settings), "friendly": found.x_adv}
    with torch.no_grad():
        wrong = {name: float((model(points).argmax(dim=1) != y).double().mean()) for name, points in sets.items()}
        taps = {name: tap(model, what.layers, points) for name, points in sets.items()}
    outputs = {number: {name: taps[name][number].flatten(1).cpu() for name in SETS} for number in what.layers}
    labels = y.cpu()
    return {
        "n": len(x),
        "labels": shown.tolist(),
        "wrong": wrong,
        "backprops": float(found.backprops.double().mean()),
        "mixing": {
            str(number): {
                name: mixing(points, labels, sets_["natural"], what.neighbours) for name, points in sets_.items()
            }
            for number, sets_ in outputs.items()
        },
        "points": {str(number): _planes(sets_, seed) for number, sets_ in outputs.items()},
    }


def _images(what: Mixture, data: Dataset) -> tuple[Tensor, Tensor, Tensor]:
    """The first test images of each class, their labels, and the class's index among the chosen ones."""
    rows = []
    for name in what.classes:
        if name not in data.classes:
            raise UserError(f"{data.name} has no class {name!r}. Choose from: {', '.join(data.classes)}.")
        members = (data.test.y == data.classes.index(name)).nonzero().flatten()
        rows.append(members[: what.images])
    taken = torch.cat(rows)
    shown = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(part) for part in rows]))
    return data.test.x[taken].float() / 255, data.test.y[taken], shown


def _planes(sets: Mapping[str, Tensor], seed: int) -> dict[str, dict[str, list[list[float]]]]:
    """All sets projected together, by PCA and by t-SNE."""
    from sklearn.decomposition import PCA  # slow to import
    from sklearn.manifold import TSNE

    together = torch.cat([sets[name] for name in SETS]).double().numpy()
    flat = PCA(n_components=min(50, *together.shape), random_state=seed).fit_transform(together)
    if flat.shape[1] == 1:
        flat = np.column_stack([flat, np.zeros(len(flat))])
    bent = TSNE(n_components=2, init="pca", perplexity=min(30, len(flat) / 4), random_state=seed).fit_transform(flat)
    return {"pca": _split(flat[:, :2]), "tsne": _split(bent)}


def _split(plane: NDArray[Any]) -> dict[str, list[list[float]]]:
    """The points of each set, rounded to one decimal.

    Each axis is scaled so that the middle 98 % span 100 units: neither outliers nor a narrow plane cost precision.
    """
    low, high = np.percentile(plane, (1, 99), axis=0)
    whole = np.ptp(plane, axis=0)
    wide = np.where(high > low, high - low, np.where(whole > 0, whole, 1.0))
    plane = 100 * (plane - low) / wide
    parts = np.split(plane, len(SETS))
    return {
        name: [[round(float(v), 1) for v in point] for point in part] for name, part in zip(SETS, parts, strict=True)
    }
