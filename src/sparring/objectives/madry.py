"""Standard adversarial training (Madry et al.; paper Eq. 2): min_f  1/n sum_i  max_{x~ in ball}  CE(f(x~), y_i)."""

from __future__ import annotations

from torch import Tensor, nn

from sparring.attacks.losses import cross_entropy
from sparring.objectives.base import Objective, worst_case


def adversarial_loss(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, beta: float) -> Tensor:
    """CE(f(x~), y)."""
    return cross_entropy(model(x_adv), y).mean()


MADRY = Objective("madry", search=worst_case, inner="ce", loss=adversarial_loss)
