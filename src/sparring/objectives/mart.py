"""MART (paper Appendix E): min_f  1/n sum_i  BCE(f(x~_i), y_i) + beta * KL(f(x_i) || f(x~_i)) * (1 - p_i[y_i])."""

from __future__ import annotations

from torch import Tensor, nn

from sparring.attacks.losses import boosted_cross_entropy, mart_weighted_kl
from sparring.objectives.base import Objective, worst_case


def mart_loss(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, beta: float) -> Tensor:
    """BCE(f(x~), y) + beta * KL(f(x) || f(x~)) * (1 - p[y])."""
    logits_adv = model(x_adv)  # adversarial first, as published: batch-norm's statistics see both, in this order
    logits_nat = model(x)
    weighted = mart_weighted_kl(logits_nat, logits_adv, y)
    return boosted_cross_entropy(logits_adv, y).mean() + beta * weighted.mean()


MART = Objective("mart", search=worst_case, inner="ce", loss=mart_loss, reads=("beta",))
