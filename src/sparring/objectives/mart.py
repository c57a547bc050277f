"""MART (paper Appendix E): min_f  1/n sum_i  BCE(f(x~_i), y_i) + beta * KL(f(x_i) || f(x~_i)) * (1 - p_i[y_i])."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from sparring.attacks.losses import boosted_cross_entropy, mart_weighted_kl
from sparring.objectives.base import KTauAttack, Progress, Search, check_beta, training_step


def mart_loss(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, beta: float) -> Tensor:
    """BCE(f(x~), y) + beta * KL(f(x) || f(x~)) * (1 - p[y])."""
    logits_adv = model(x_adv)  # adversarial first, as published: batch-norm's statistics see both, in this order
    logits_nat = model(x)
    weighted = mart_weighted_kl(logits_nat, logits_adv, y)
    return boosted_cross_entropy(logits_adv, y).mean() + beta * weighted.mean()


@dataclass(frozen=True, kw_only=True)
class MART(KTauAttack):
    """MART: boosted cross-entropy on adversarial data, and a KL weighted by how wrong the natural prediction is."""

    name: ClassVar[str] = "mart"
    __call__ = training_step

    beta: float = 6.0
    """Weight of the regulariser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)

    def search(self, progress: Progress) -> Search:
        """PGD-K on the cross-entropy."""
        return self.k_tau(progress, tau=self.steps)

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """BCE(f(x~), y) + beta * KL(f(x) || f(x~)) * (1 - p[y])."""
        return mart_loss(model, x, x_adv, y, self.beta)
