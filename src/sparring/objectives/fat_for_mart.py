"""FAT for MART (paper Appendix E): MART on the data of early-stopped PGD. At tau = K it is MART."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from sparring.objectives.base import KTauAttack, Progress, Search, check_beta, check_tau, training_step
from sparring.objectives.mart import mart_loss
from sparring.schedules import Scheduled


@dataclass(frozen=True, kw_only=True)
class FATForMART(KTauAttack):
    """FAT for MART: the loss of MART on the data of PGD-K-tau."""

    name: ClassVar[str] = "fat-mart"
    __call__ = training_step

    tau: Scheduled = Scheduled(0)
    """Steps still taken once the model is fooled, e.g. 1, or 0,1@21,2@41,3@61,4@81."""
    beta: float = 6.0
    """Weight of the regulariser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tau(self.tau)
        check_beta(self.beta)

    def search(self, progress: Progress) -> Search:
        """PGD-K-tau on the cross-entropy."""
        return self.k_tau(progress, tau=int(progress.value(self.tau)))

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """BCE(f(x~), y) + beta * KL(f(x) || f(x~)) * (1 - p[y])."""
        return mart_loss(model, x, x_adv, y, self.beta)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and tau."""
        return super().metrics(progress) | {"tau": int(progress.value(self.tau))}
