"""TRADES (paper Appendix D): min_f  1/n sum_i  CE(f(x_i), y_i) + beta * KL(f(x_i) || f(x~_i)),  x~ climbing the KL.

The paper's algorithm for FAT for TRADES prints the cross-entropy on the adversarial data in its update line; its
equation and all published code use the natural data, and so does this.
"""

from __future__ import annotations

from torch import Tensor, nn

from sparring.attacks.losses import cross_entropy, kl
from sparring.objectives.base import Objective, worst_case


def trades_loss(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, beta: float) -> Tensor:
    """CE(f(x), y) + beta * KL(f(x) || f(x~)), the gradient through both."""
    logits_nat = model(x)  # two forwards, natural first: batch-norm's statistics see both, in this order
    logits_adv = model(x_adv)
    return cross_entropy(logits_nat, y).mean() + beta * kl(logits_nat, logits_adv).mean()


TRADES = Objective("trades", search=worst_case, inner="kl", loss=trades_loss, reads=("beta",))
