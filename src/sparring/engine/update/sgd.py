"""SGD of one parameter group on tensors that stay in place, so that it can be captured. The rule is torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparring.engine.layout import resting


class Sgd:
    """Moves the trainable `parameters` of a group. Momenta are kept in the optimiser: a checkpoint holds them."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
        self.momentum, self.weight_decay = float(group["momentum"]), float(group["weight_decay"])
        self.nesterov, self.parameters = bool(group["nesterov"]), parameters
        # A momentum of zero gives torch's own first step: m * 0 + g.
        moved = parameters if self.momentum else []
        self.state = [resting(optimizer.state[parameter], "momentum_buffer", parameter) for parameter in moved]

    @staticmethod
    def unsupported(group: dict[str, Any]) -> str:
        """Why the steps of a group cannot be taken here; empty where they can."""
        return next((f"SGD with {name} is not captured" for name in ("maximize", "dampening") if group[name]), "")

    def __call__(self, gradients: list[Tensor], lr: Tensor, skip: Tensor) -> None:
        """Take the step; none where `skip` is 1."""
        torch._fused_sgd_(
            self.parameters,
            gradients,
            self.state,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,
            found_inf=skip,
        )
