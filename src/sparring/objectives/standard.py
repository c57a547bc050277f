"""Standard training: min_f  1/n sum_i  CE(f(x_i), y_i)."""

from __future__ import annotations

from torch import Tensor, nn

from sparring.attacks.losses import cross_entropy
from sparring.objectives.base import Objective, natural


def standard_loss(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, beta: float) -> Tensor:
    """CE(f(x), y)."""
    return cross_entropy(model(x), y).mean()


STANDARD = Objective("standard", search=natural, inner="ce", loss=standard_loss)
