"""Friendly adversarial training (paper Sections 4.1, 5): worst-case training on the data of early-stopped PGD.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i from PGD-K-tau instead of PGD-K. At tau = K it is Madry's training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from sparring.objectives.base import KTauAttack, Progress, Search, check_tau, training_step
from sparring.objectives.madry import adversarial_loss
from sparring.schedules import Scheduled


@dataclass(frozen=True, kw_only=True)
class FAT(KTauAttack):
    """Friendly adversarial training: cross-entropy on the data of PGD-K-tau."""

    name: ClassVar[str] = "fat"
    __call__ = training_step

    tau: Scheduled = Scheduled(0)
    """Steps still taken once the model is fooled, e.g. 1, or 0,1@51,2@91, or 0,1@40%,2@75%."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tau(self.tau)

    def search(self, progress: Progress) -> Search:
        """PGD-K-tau."""
        return self.k_tau(progress, tau=int(progress.value(self.tau)))

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and tau."""
        return super().metrics(progress) | {"tau": int(progress.value(self.tau))}
