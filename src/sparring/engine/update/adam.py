"""Adam and AdamW of one parameter group on tensors that stay in place, so that it can be captured. Torch's rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparring.engine.layout import resting


class Adam:
    """Moves the trainable `parameters` of a group. Moments and counts of steps are kept in the optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
        self.rule = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self.betas = tuple(float(beta) for beta in group["betas"])
        self.weight_decay, self.eps, self.parameters = float(group["weight_decay"]), float(group["eps"]), parameters
        states = [optimizer.state[parameter] for parameter in parameters]
        pairs = list(zip(states, parameters, strict=True))
        self.steps = [resting(state, "step", torch.zeros((), device=p.device)) for state, p in pairs]
        self.first = [resting(state, "exp_avg", p) for state, p in pairs]
        self.second = [resting(state, "exp_avg_sq", p) for state, p in pairs]
        self.state = [*self.steps, *self.first, *self.second]

    @staticmethod
    def unsupported(group: dict[str, Any]) -> str:
        """Why the steps of a group cannot be taken here; empty where they can."""
        return next((f"Adam with {name} is not captured" for name in ("maximize", "amsgrad") if group[name]), "")

    def __call__(self, gradients: list[Tensor], lr: Tensor, skip: Tensor) -> None:
        """Take the step; none, not even in the counts, where `skip` is 1."""
        torch._foreach_add_(self.steps, 1.0)
        self.rule(
            self.parameters,
            gradients,
            self.first,
            self.second,
            [],
            self.steps,
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )
        torch._foreach_sub_(self.steps, [skip] * len(self.steps))
