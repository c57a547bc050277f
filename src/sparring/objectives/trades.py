"""TRADES (paper Appendix D): min_f  1/n sum_i  CE(f(x_i), y_i) + beta * KL(f(x_i) || f(x~_i)),  x~ ascending the KL.

The paper's algorithm for FAT for TRADES prints the cross-entropy on the adversarial data in its update line; its
equation and all published code use the natural data, and so does this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from sparring.attacks.losses import cross_entropy, kl
from sparring.objectives.base import KTauAttack, Progress, Search, check_beta, check_kl_start, training_step


def trades_loss(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, beta: float) -> Tensor:
    """CE(f(x), y) + beta * KL(f(x) || f(x~)), the gradient through both."""
    logits_nat = model(x)  # two forwards, natural first: batch-norm's statistics see both, in this order
    logits_adv = model(x_adv)
    return cross_entropy(logits_nat, y).mean() + beta * kl(logits_nat, logits_adv).mean()


@dataclass(frozen=True, kw_only=True)
class TRADES(KTauAttack):
    """TRADES: natural cross-entropy, and the KL between the predictions on natural and adversarial data."""

    name: ClassVar[str] = "trades"
    __call__ = training_step

    beta: float = 6.0
    """Weight of the regulariser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        check_kl_start(self, self.name)

    def search(self, progress: Progress) -> Search:
        """PGD-K on the KL."""
        return self.k_tau(progress, tau=self.steps, loss="kl")

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x), y) + beta * KL(f(x) || f(x~))."""
        return trades_loss(model, x, x_adv, y, self.beta)
