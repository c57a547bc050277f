"""Standard adversarial training (Madry et al.; paper Eq. 2): min_f  1/n sum_i  max_{x~ in ball}  CE(f(x~), y_i)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from sparring.attacks.losses import cross_entropy
from sparring.objectives.base import KTauAttack, Progress, Search, training_step


def adversarial_loss(model: nn.Module, x_adv: Tensor, y: Tensor) -> Tensor:
    """CE(f(x~), y), averaged over the batch."""
    return cross_entropy(model(x_adv), y).mean()


@dataclass(frozen=True, kw_only=True)
class Madry(KTauAttack):
    """Worst-case training: cross-entropy on the data of plain PGD-K."""

    name: ClassVar[str] = "madry"
    __call__ = training_step

    def search(self, progress: Progress) -> Search:
        """PGD-K, which is PGD-K-tau at tau = K."""
        return self.k_tau(progress, tau=self.steps)

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)
