"""FAT for TRADES (paper Appendix D): TRADES on the data of early-stopped PGD. At tau = K it is TRADES."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from sparring.objectives.base import (
    KTauAttack,
    Progress,
    Search,
    check_beta,
    check_kl_start,
    check_tau,
    training_step,
)
from sparring.objectives.trades import trades_loss
from sparring.schedules import Scheduled


@dataclass(frozen=True, kw_only=True)
class FATForTRADES(KTauAttack):
    """FAT for TRADES: the loss of TRADES on the data of PGD-K-tau."""

    name: ClassVar[str] = "fat-trades"
    __call__ = training_step

    tau: Scheduled = Scheduled(0)
    """Steps still taken once the model is fooled, e.g. 1, or 0,1@31,2@51,3@71."""
    beta: float = 6.0
    """Weight of the regulariser."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tau(self.tau)
        check_beta(self.beta)
        check_kl_start(self, self.name)

    def search(self, progress: Progress) -> Search:
        """PGD-K-tau on the KL."""
        return self.k_tau(progress, tau=int(progress.value(self.tau)), loss="kl")

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x), y) + beta * KL(f(x) || f(x~))."""
        return trades_loss(model, x, x_adv, y, self.beta)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and tau."""
        return super().metrics(progress) | {"tau": int(progress.value(self.tau))}
