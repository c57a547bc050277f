"""The plain engine's update: torch's own optimiser, one operation after the other. The reference for every other path.

The plain engine's attack needs no code: the search is called with the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparring.engine.layout import like
from sparring.engine.update.awp import gradients
from sparring.engine.update.exchange import ALONE, Exchange, no_images, statistics
from sparring.engine.update.norm import checked, ratios
from sparring.engine.update.step import BatchLoss


class PlainUpdate:
    """Loss in train mode, gradient, and, if both are finite, the optimiser's step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: BatchLoss,
        after: Callable[[], None] = lambda: None,
        exchange: Exchange = ALONE,
        clip: float = 0.0,
    ) -> None:
        """`after` runs behind every step that was taken; `clip` is the largest global norm of a gradient, 0: none."""
        self.model, self.optimizer, self.loss, self.after, self.exchange = model, optimizer, loss, after, exchange
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.statistics = statistics(model)
        self.clip, self.ratios, self.bad = clip, ratios(optimizer), False
        # Torch's fused rules read weights and gradients as flat memory.
        self.flat = any(group.get("fused") for group in optimizer.param_groups)

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss, detached."""
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = lr * ratio
        loss, found = self._gradients(x, x_adv, y, awp)
        self.exchange([loss, *found, *self.statistics])
        finite, found = checked(loss, found, self.clip)
        for parameter, gradient in zip(self.parameters, found, strict=True):
            parameter.grad = like(gradient, parameter, parameter.dtype) if self.flat else gradient
        self.bad = not bool(finite)
        if not self.bad:
            self.optimizer.step()
            self.after()
        return loss

    def _gradients(self, x: Tensor, x_adv: Tensor, y: Tensor, awp: float) -> tuple[Tensor, list[Tensor]]:
        if len(x) == 0:
            if awp:  # the others exchange the direction of the perturbation first
                self.exchange.mean([torch.zeros_like(weight) for weight in self.parameters if weight.dim() > 1])
            return no_images(self.parameters, x)
        return gradients(
            lambda: self.loss(self.model, x, x_adv, y),
            list(self.model.buffers()),
            self.parameters,
            self.parameters,
            x.new_tensor(awp) if awp else None,
            self.exchange,
        )

    def failed(self) -> bool:
        """Whether the last step was not taken."""
        return self.bad
