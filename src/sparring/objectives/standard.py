"""Standard training: min_f  1/n sum_i  CE(f(x_i), y_i)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from sparring.attacks.losses import cross_entropy
from sparring.attacks.threat import Norm
from sparring.objectives.base import NoAttack, Progress, Search, training_step


@dataclass(frozen=True)
class Standard:
    """Standard training on natural data: no defence."""

    name: ClassVar[str] = "standard"
    fixed_sizes: ClassVar[bool] = True
    norm: ClassVar[Norm] = "linf"  # of the validation
    __call__ = training_step

    @property
    def radius(self) -> float:
        """0: there is no attack."""
        return 0.0

    @property
    def most_backprops(self) -> int:
        """0: there is no attack."""
        return 0

    def search(self, progress: Progress) -> Search:
        """The images themselves."""
        return NoAttack()

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x), y)."""
        return cross_entropy(model(x), y).mean()

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps 0."""
        return {"eps": 0.0}

    def own_attack(self, progress: Progress) -> dict[str, Any] | None:
        """None: nothing besides the usual validation."""
        return None

    def advice(self, epochs: int) -> list[str]:
        """Nothing."""
        return []
