"""FAT whose tau grows as robustness stalls (the paper's further research a).

tau grows by one, up to K, once the validation accuracy under PGD-10 has not improved for `patience` epochs; then the
count of epochs begins anew, for accuracy may fall before harder data pay. So the data stay as friendly as they can
while they still teach robustness. The rule is CAT's, which watches its own attack instead. tau is a function of the
recorded epochs, so there is no state to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from sparring.objectives.base import KTauAttack, Progress, Search, training_step
from sparring.objectives.cat import check_patience, mastered_steps
from sparring.objectives.madry import adversarial_loss


@dataclass(frozen=True, kw_only=True)
class FATPatient(KTauAttack):
    """Friendly training with a tau that grows when validation robustness stalls."""

    name: ClassVar[str] = "fat-patient"
    __call__ = training_step

    patience: int = 10
    """Epochs without a better validation accuracy under PGD-10 before tau grows by one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patience(self.patience)

    def tau(self, progress: Progress) -> int:
        """How often the robust accuracy has stalled."""
        accuracies = [metrics["pgd10"] for metrics in progress.history]
        return mastered_steps(accuracies, self.patience, self.steps + 1) - 1

    def search(self, progress: Progress) -> Search:
        """PGD-K-tau."""
        return self.k_tau(progress, tau=self.tau(progress))

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and tau."""
        return super().metrics(progress) | {"tau": self.tau(progress)}
