"""What a network that is run by hand can do: forward and back, launch by launch, without autograd.

manual.py has it for chains and residual networks, wide.py for wide ResNets. Values are what a forward leaves for the
way back, which may be that of fewer images: `among` tells which of the forward's images each was (pointwise.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class ManualNetwork(Protocol):
    """Pixels to logits, and a gradient of the logits back to the pixels."""

    channels: int  # of the pixels

    def refresh(self) -> None:
        """Take over the weights of the units."""

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether the kernels can read such images, so many."""

    def compile_for(self, sizes: Iterable[int], shape: Iterable[int]) -> None:
        """Have the kernels for so many images compiled side by side."""

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[rows], and the values."""

    def back(self, slope: Tensor, values: list[Tensor], among: Tensor | None = None) -> Tensor:
        """From the logits' gradient to that behind the first layer, from where the next two go on."""

    def to_pixels(self, gradient: Tensor) -> Tensor:
        """The gradient at the pixels, in fp32."""

    def move(
        self,
        gradient: Tensor,
        x_adv: Tensor,
        x: Tensor,
        target: Tensor,
        kicks: Tensor | None,
        numbers: Tensor,
        step_index: Tensor,
        *,
        project: bool,
    ) -> None:
        """The step along the sign of that gradient, in place: see kernels.move."""


def with_autograd(manual: ManualNetwork, x: Tensor) -> Tensor:
    """Logits, which autograd can take back to x."""
    logits: Tensor = _Both.apply(x, manual)  # type: ignore[no-untyped-call]
    return logits


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, manual: ManualNetwork) -> Tensor:
        logits, values = manual.forward(x.contiguous(), torch.arange(len(x), device=x.device))
        if ctx.needs_input_grad[0]:
            ctx.manual, ctx.values = manual, values
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.manual.to_pixels(ctx.manual.back(gradients[0].contiguous(), ctx.values)), None
