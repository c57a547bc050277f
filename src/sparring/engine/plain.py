"""The plain engine's update: torch's own optimiser, one operation after the other. The reference for every other path.

The plain engine's attack needs no code: the search is called with the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparring.engine.update.awp import gradients
from sparring.engine.update.sgd import finite
from sparring.engine.update.step import BatchLoss, Exchange, alone


class PlainUpdate:
    """Loss in train mode, gradient, and, if both are finite, the optimiser's step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: BatchLoss,
        after: Callable[[], None] = lambda: None,
        exchange: Exchange = alone,
    ) -> None:
        """`after` runs behind every step that was taken."""
        self.model, self.optimizer, self.loss, self.after, self.exchange = model, optimizer, loss, after, exchange
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.bad = False

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss, detached."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, found = gradients(
            lambda: self.loss(self.model, x, x_adv, y),
            list(self.model.buffers()),
            self.parameters,
            self.parameters,
            x.new_tensor(awp) if awp else None,
        )
        self.exchange([loss, *found])
        for parameter, gradient in zip(self.parameters, found, strict=True):
            parameter.grad = gradient
        self.bad = not bool(finite(loss, found))
        if not self.bad:
            self.optimizer.step()
            self.after()
        return loss

    def failed(self) -> bool:
        """Whether the last step was not taken."""
        return self.bad
