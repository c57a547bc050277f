"""FAT whose tau follows the BP average (the paper's further research a): no schedule, no held-out data.

tau_t = floor(share * BP_{t-1}),  tau_1 = 0.  The more steps an attack needs, the farther the run has pushed its
boundary away (paper Sections 5.2, 5.3), and the farther the next attack goes beyond it: tau is a share of all steps
taken, tau's own and those of examples that were never fooled included. At K = 10 and share 1/4 it is 0 below 4 BPs, 1
from 4, 2 from 8: it cannot pass 2, the end of the paper's schedule. tau is a function of the recorded epochs, so there
is no state to save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from sparring.attacks.threat import is_number
from sparring.errors import UserError
from sparring.objectives.base import KTauAttack, Progress, Search, training_step
from sparring.objectives.madry import adversarial_loss


@dataclass(frozen=True, kw_only=True)
class FATPaced(KTauAttack):
    """Friendly training with tau a share of the last epoch's mean back-propagations."""

    name: ClassVar[str] = "fat-paced"
    __call__ = training_step

    share: float = 0.25
    """Steps beyond the boundary as a part of the mean steps of the last epoch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.share) or not 0 <= self.share <= 1:
            raise UserError(f"share must lie in [0, 1], got {self.share!r}. Write for example 1/4.")

    def tau(self, progress: Progress) -> int:
        """floor(share * BPs of the last epoch)."""
        backprops = progress.history[-1]["backprops"] if progress.history else 0.0
        return math.floor(self.share * backprops)

    def search(self, progress: Progress) -> Search:
        """PGD-K-tau."""
        return self.k_tau(progress, tau=self.tau(progress))

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and tau."""
        return super().metrics(progress) | {"tau": self.tau(progress)}
