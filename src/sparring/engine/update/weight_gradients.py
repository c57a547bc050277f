"""Gradients of weights on a second stream, while the gradient of the input goes on to the layers below.

The backward pass of a convolution computes two gradients from one: that of its input, which the layers below wait for,
and that of its weight, which is not needed before the weights move. Autograd computes one after the other. Here the
weight's is launched on a second stream, where it fills what the kernels of the first leave idle. To autograd such a
weight has no gradient: `gradients` asks it for the others, waits for the second stream and joins the two. Without CUDA
there is one stream, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class WeightGradientStream:
    """Collects the gradients of weights until the backward pass is over."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.tuned: set[tuple[Any, ...]] = set()  # cuDNN times its kernels at first: nothing may run beside it then
        self.found: dict[int, Tensor] = {}
        self.read: list[Tensor] = []  # read by kernels that may not have run yet: their memory must not be reused

    def convolution(self, x: Tensor, conv: nn.Conv2d, weight: Tensor, copies: int = 1) -> Tensor:
        """conv(x) without its bias; the weight's gradient goes to the second stream.

        `weight` holds `copies` copies of conv's weight, side by side for x's channels, and zeros.
        """
        given = (x, conv.weight, conv, weight.detach(), copies, self)
        out: Tensor = _Convolution.apply(*given)  # type: ignore[no-untyped-call]
        return out

    def put(self, conv: nn.Conv2d, gradient: Tensor, x: Tensor, weight: Tensor, copies: int) -> None:
        """Launch the gradient of a weight, from that at the convolution's output."""
        if self.stream is None:
            self._add(conv, gradient, x, weight, copies)
            return
        here = torch.cuda.current_stream(gradient.device)
        kind = (x.shape, weight.shape, gradient.shape, conv.stride, conv.padding, conv.dilation)
        if kind not in self.tuned:
            here.wait_stream(self.stream)
            self._add(conv, gradient, x, weight, copies)
            self.tuned.add(kind)
            return
        before = self.found.get(id(conv.weight))
        self.read += [gradient, x, weight, *([] if before is None else [before])]
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            self._add(conv, gradient, x, weight, copies)

    def _add(self, conv: nn.Conv2d, gradient: Tensor, x: Tensor, weight: Tensor, copies: int) -> None:
        leaf = conv.weight
        found = _backward(gradient, x, weight, conv, [False, True, False])[1]
        if found.shape != leaf.shape:
            rows, inputs = leaf.shape[:2]
            each = [found[:rows, place : place + inputs] for place in range(0, copies * inputs, inputs)]
            found = torch.empty_like(leaf).copy_(sum(each[1:], start=each[0]))
        before = self.found.get(id(leaf))  # where the layer ran twice
        self.found[id(leaf)] = found if before is None else before + found

    def gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
        """As `torch.autograd.grad`, including the gradients from the second stream."""
        self.found.clear()
        try:
            direct = torch.autograd.grad(loss, leaves, allow_unused=True)
        except BaseException:
            if self.stream is not None and not torch.cuda.is_current_stream_capturing():
                self.stream.synchronize()
            self._forget()
            raise
        if self.stream is not None and self.read:  # a capture cannot wait for a stream that is not part of it
            torch.cuda.current_stream(loss.device).wait_stream(self.stream)
        found = [self.found.get(id(leaf)) for leaf in leaves]
        self._forget()
        return [_both(one, other) for one, other in zip(direct, found, strict=True)]

    def _forget(self) -> None:
        self.found.clear()
        self.read.clear()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, leaf: Tensor, conv: nn.Conv2d, weight: Tensor, copies: int, stream: WeightGradientStream
    ) -> Tensor:
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        ctx.conv, ctx.copies, ctx.stream = conv, copies, stream
        with torch.autocast(x.device.type, enabled=False):  # the backward pass needs what was computed with
            return nn.functional.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        if ctx.needs_input_grad[1]:
            ctx.stream.put(ctx.conv, gradient, x, weight, ctx.copies)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _backward(gradient, x, weight, ctx.conv, [True, False, False])[0]
        return of_x, None, None, None, None, None


def _backward(gradient: Tensor, x: Tensor, weight: Tensor, conv: nn.Conv2d, which: list[bool]) -> Any:
    how = (conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups)
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *how, which)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor:
    if one is not None and other is not None:
        return one + other
    found = other if one is None else one
    if found is None:
        raise RuntimeError("a weight that takes no part in the loss has no gradient")
    return found
