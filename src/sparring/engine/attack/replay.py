"""A network for many calls on few images: its forward and backward pass are captured once and replayed.

AutoAttack calls the model thousands of times on some hundred images, where launching forty kernels takes longer than
running them. Every result is a copy, so that a caller may keep it and call again before the backward pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparring.engine.attack.buckets import fitting
from sparring.engine.attack.folded import Folded
from sparring.engine.cuda_graphs import Captured, NotCapturable, pool_for

SIZES = (*range(32, 257, 32), *range(320, 1025, 64))  # more images keep a GPU busy without this
_PATIENCE = 3  # calls of a size before it is captured


class _Passes(Protocol):
    """Of a hand-written network (manual/manual_network.py), what is replayed."""

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether it can read such images, `images` of them at once."""

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[rows], and what `back` reads."""

    def back(self, output_gradient: Tensor, values: list[Tensor]) -> Tensor:
        """The gradient behind the first layer."""

    def to_pixels(self, gradient: Tensor) -> Tensor:
        """The gradient at the pixels."""


class ModelItself(nn.Module):
    """A model as it is, in its own precision, with the passes that `Replayed` captures."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.manual = model, _ByAutograd(model)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        return self.model(x)  # type: ignore[no-any-return]


class _ByAutograd:
    """Both passes of a model, by autograd."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def takes(self, x: Tensor, images: int = 0) -> bool:
        return x.dtype == torch.float32

    @torch.enable_grad()
    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        point = x.detach().requires_grad_()  # `rows` are all of them
        logits = self.model(point)
        return logits.detach(), [logits, point]

    def back(self, output_gradient: Tensor, values: list[Tensor]) -> Tensor:
        logits, point = values
        return torch.autograd.grad(logits, point, output_gradient, retain_graph=True)[0]

    def to_pixels(self, gradient: Tensor) -> Tensor:
        return gradient


class Replayed(nn.Module):
    """The network, with captured passes for frequent batch sizes.

    Batches are filled up to one of the sizes, captured or not, so that a capture changes no bit of a result.
    """

    def __init__(self, network: Folded | ModelItself, *, sizes: tuple[int, ...] = SIZES, kept: int = 4) -> None:
        """`kept`: the most captures at a time, each of which holds all activations of its images."""
        super().__init__()
        self.network, self.sizes, self.kept = network, sizes, kept
        self.calls: dict[tuple[int, ...], int] = {}
        self.made: dict[tuple[int, ...], _Pair] = {}  # the last used is the last

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        manual: _Passes | None = self.network.manual
        size = fitting(self.sizes, len(x)) if 0 < len(x) <= self.sizes[-1] else 0
        if manual is None or not size or not manual.takes(x, size):
            return self.network(x)  # type: ignore[no-any-return]
        shape = (size, *x.shape[1:])
        self.calls[shape] = self.calls.get(shape, 0) + 1
        pair = self._pair(manual, shape, x.device) if self.calls[shape] >= _PATIENCE else None
        if pair is None:
            filled = torch.cat([x, x.new_zeros(shape[0] - len(x), *x.shape[1:])])
            return self.network(filled)[: len(x)]  # type: ignore[no-any-return]
        logits: Tensor = _Replay.apply(x, pair)  # type: ignore[no-untyped-call]
        return logits

    def forget(self) -> None:
        """Release the captures' memory."""
        self.made.clear()
        self.calls.clear()

    def _pair(self, manual: _Passes, shape: tuple[int, ...], device: torch.device) -> _Pair | None:
        """The captured passes; None where they cannot be captured or do not fit into memory."""
        pair = self.made.pop(shape, None)
        try:
            pair = pair or _Pair(manual, shape, device)
        except (torch.OutOfMemoryError, NotCapturable):
            self.made.clear()
            self.calls[shape] = -1000  # not again soon
            return None
        while len(self.made) >= self.kept:
            oldest = next(iter(self.made))
            del self.made[oldest]
            self.calls[oldest] = 0  # sizes that alternate must not be captured at every call
        self.made[shape] = pair
        return pair


class _Pair:
    """Both passes for one batch size, on tensors that stay in place."""

    logits: Tensor
    gradient: Tensor

    def __init__(self, manual: _Passes, shape: tuple[int, ...], device: torch.device) -> None:
        self.x = torch.zeros(shape, dtype=torch.float32, device=device)
        self.rows = torch.arange(len(self.x), device=device)
        self.serial = 0  # number of the forward pass that the values belong to
        self.values: list[Tensor] = []
        pool = pool_for(device)

        def forward() -> None:
            self.logits, self.values = manual.forward(self.x, self.rows)

        def backward() -> None:
            self.gradient = manual.to_pixels(manual.back(self.output_gradient, self.values))

        self.forward = Captured(forward, pool)
        self.forward()
        self.output_gradient = torch.zeros_like(self.logits)
        self.backward = Captured(backward, pool)

    def logits_of(self, x: Tensor) -> Tensor:
        """The logits of x."""
        self.x[: len(x)].copy_(x)
        self.forward()
        self.serial += 1
        return self.logits[: len(x)].clone()

    def gradient_at(self, x: Tensor, serial: int, output_gradient: Tensor) -> Tensor:
        """The gradient at x, whose logits came from forward pass number `serial`."""
        if serial != self.serial:  # there were other images since
            self.logits_of(x)
        self.output_gradient[: len(x)].copy_(output_gradient)  # what lies behind them does not matter
        self.backward()
        return self.gradient[: len(x)].clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: _Pair) -> Tensor:
        logits = pair.logits_of(x)
        ctx.save_for_backward(x)
        ctx.pair, ctx.serial = pair, pair.serial
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.pair.gradient_at(x, ctx.serial, gradients[0]), None
