"""A folded network for callers who ask often about few images: its manual are captured once and replayed.

AutoAttack asks thousands of times about some hundred images; launching forty kernels takes longer then than running
them. Every answer is a copy, so that a caller may keep it and call again before he asks for a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparring.engine.attack.buckets import fitting
from sparring.engine.attack.folded import Folded
from sparring.engine.cuda_graphs import Captured, NotCapturable, pool_for
from sparring.engine.manual.manual_network import ManualNetwork

SIZES = (*range(32, 257, 32), *range(320, 1025, 64))  # more images keep a GPU busy without this
_PATIENCE = 3  # calls of a size before it is worth a capture


class Replayed(nn.Module):
    """The network, by captured manual for the sizes that come often.

    Images are filled up to one of the sizes, captured or not, so that a capture changes no bit of an answer.
    """

    def __init__(self, network: Folded, *, sizes: tuple[int, ...] = SIZES, kept: int = 4) -> None:
        """`kept`: how many captures, each of which holds all values of its images."""
        super().__init__()
        self.network, self.sizes, self.kept = network, sizes, kept
        self.asked: dict[tuple[int, ...], int] = {}
        self.made: dict[tuple[int, ...], _Pair] = {}  # the last used is the last

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        manual = self.network.manual
        size = fitting(self.sizes, len(x)) if 0 < len(x) <= self.sizes[-1] else 0
        if manual is None or not size or not manual.takes(x, size):
            return self.network(x)  # type: ignore[no-any-return]
        shape = (size, *x.shape[1:])
        self.asked[shape] = self.asked.get(shape, 0) + 1
        pair = self._pair(manual, shape, x.device) if self.asked[shape] >= _PATIENCE else None
        if pair is None:
            filled = torch.cat([x, x.new_zeros(shape[0] - len(x), *x.shape[1:])])
            return self.network(filled)[: len(x)]  # type: ignore[no-any-return]
        logits: Tensor = _Replay.apply(x, pair)  # type: ignore[no-untyped-call]
        return logits

    def forget(self) -> None:
        """Give the captures' memory back."""
        self.made.clear()
        self.asked.clear()

    def _pair(self, manual: ManualNetwork, shape: tuple[int, ...], device: torch.device) -> _Pair | None:
        """The captured manual; none where there is no memory for them."""
        pair = self.made.pop(shape, None)
        try:
            pair = pair or _Pair(manual, shape, device)
        except (torch.OutOfMemoryError, NotCapturable):
            self.made.clear()
            self.asked[shape] = -1000  # not again soon
            return None
        while len(self.made) >= self.kept:
            oldest = next(iter(self.made))
            del self.made[oldest]
            self.asked[oldest] = 0  # to be patient with it anew, where sizes alternate
        self.made[shape] = pair
        return pair


class _Pair:
    """Both manual for one number of images, on tensors that stay in place."""

    logits: Tensor
    gradient: Tensor

    def __init__(self, manual: ManualNetwork, shape: tuple[int, ...], device: torch.device) -> None:
        self.x = torch.zeros(shape, device=device)
        self.rows = torch.arange(len(self.x), device=device)
        self.serial = 0  # of the images that the values belong to
        self.values: list[Tensor] = []
        pool = pool_for(device)

        def there() -> None:
            self.logits, self.values = manual.forward(self.x, self.rows)

        def back() -> None:
            self.gradient = manual.to_pixels(manual.back(self.slope, self.values))

        self.there = Captured(there, pool)
        self.there()
        self.slope = torch.zeros_like(self.logits)
        self.back = Captured(back, pool)

    def ask(self, x: Tensor) -> Tensor:
        """The logits of x."""
        self.x[: len(x)].copy_(x)
        self.there()
        self.serial += 1
        return self.logits[: len(x)].clone()

    def slopes(self, x: Tensor, serial: int, slope: Tensor) -> Tensor:
        """The gradient at x, whose logits were answer number `serial`."""
        if serial != self.serial:  # somebody has asked about other images since
            self.ask(x)
        self.slope[: len(x)].copy_(slope)  # behind them lies anything: images do not see one another
        self.back()
        return self.gradient[: len(x)].clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: _Pair) -> Tensor:
        logits = pair.ask(x)
        ctx.save_for_backward(x)
        ctx.pair, ctx.serial = pair, pair.serial
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.pair.slopes(x, ctx.serial, gradients[0]), None
