"""Figure 2 and Theorem 1 on real losses: the loss of an image after PGD and after early-stopped PGD.

The loss is cross-entropy in bits, which bounds the 0/1 loss: where the model is wrong, the true class has at most half
of the probability. The inner problems are solved only as well as PGD solves them, so both bounds are estimates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sparring.attacks import friendly_pgd, losses, pgd
from sparring.data import Dataset
from sparring.paper.specs import Losses


def measure(what: Losses, model: nn.Module, data: Dataset, *, device: torch.device) -> dict[str, Any]:
    """Margin and loss of every image (natural, after PGD, after early-stopped PGD), their means, and both bounds."""
    split = data.test.head(what.images).to(device)
    x, y = split.x.float() / 255, split.y
    settings: dict[str, Any] = {"eps": what.eps, "step_size": what.step_size, "steps": what.steps, "start": None}
    found = friendly_pgd(model, x, y, tau=0, **settings)
    sets = {"natural": x, "friendly": found.x_adv, "pgd": pgd(model, x, y, **settings)}
    each = {name: _losses(model, points, y) for name, points in sets.items()}
    mean = {name: float(loss.mean()) for name, (_, loss) in each.items()}
    wrong = {name: float((margin <= 0).double().mean()) for name, (margin, _) in each.items()}
    fooled = each["friendly"][0] <= 0
    return {
        "n": len(x),
        "backprops": float(found.backprops.double().mean()),
        "mean_loss_bits": mean,
        "wrong": wrong,
        "mean_loss_bits_where_fooled": {name: float(loss[fooled].mean()) for name, (_, loss) in each.items()},
        # Theorem 1 at rho = 0: risk <= E loss(natural) + E loss*. In the conventional bound loss* is the maximum.
        "bound": {
            "risk": wrong["pgd"],
            "min_min": mean["natural"] + mean["friendly"],
            "min_max": mean["natural"] + mean["pgd"],
        },
        "points": {
            name: [[round(float(m), 3), round(float(v), 3)] for m, v in zip(margin, loss, strict=True)]
            for name, (margin, loss) in each.items()
        },
    }


@torch.no_grad()
def _losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Margin of the true class in logits (negative: wrong), and cross-entropy in bits."""
    logits = model(x)
    return -losses.margin(logits, y), losses.cross_entropy(logits, y) / math.log(2)
