"""The interface of a hand-written network: forward and backward pass, launch by launch, without autograd.

chain.py has one for chains and residual networks, wide_resnet.py one for wide ResNets. Values are what a forward pass
keeps for the backward pass, which may be that of fewer images: `among` lists their places in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class ManualNetwork(Protocol):
    """Pixels to logits, and the gradient at the logits back to the pixels."""

    channels: int  # of the pixels

    def refresh(self) -> None:
        """Read the weights of the folded layers again."""

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether the kernels can read such images, `images` of them at once."""

    def compile_for(self, sizes: Iterable[int], shape: Iterable[int]) -> None:
        """Compile the kernels for these batch sizes side by side."""

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[rows], and the values."""

    def back(
        self, output_gradient: Tensor, values: list[Tensor], among: Tensor | None = None, *, sized: bool = True
    ) -> Tensor:
        """The gradient behind the first layer, from that at the logits; `to_pixels` and `move` go on from there.

        For `move`, which reads signs, each image's may be off by a positive factor: not `sized`.
        """

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
        """Take the step along the sign of that gradient, in place, as attack_step.move does."""


def with_autograd(manual: ManualNetwork, x: Tensor) -> Tensor:
    """Logits that autograd can differentiate with respect to x."""
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
