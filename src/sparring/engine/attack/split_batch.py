"""A gradient of many images as two of fewer, side by side on two streams.

A convolution of cuDNN is cut into tiles of fixed size, and its last round of them leaves processors idle; so does what
lies between two convolutions and waits for memory. The kernels of another part fill that. The parts meet twice: when
their logits are judged, and when the images move. Whether it pays depends on the sizes alone, by `CUTS`, and not on a
clock, so that two runs of one seed are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Network = Callable[[Tensor], Tensor]
Back = Callable[[Tensor], Tensor]  # the gradient at the logits to that at the images

# WRN-34-10 on an H200, where parts are faster than the whole by 2 % or more (results/engine/cuts-wrn-34-10-h200.json;
# measured with a compiler's kernels between the convolutions, before wide.py was there).
CUTS: dict[int, tuple[int, ...]] = {
    32: (16, 16),
    56: (32, 24),
    64: (32, 32),
    80: (40, 40),
    112: (96, 16),
    128: (96, 32),
}


def ahead(network: Network, x: Tensor) -> tuple[Tensor, Back]:
    """The logits, and the way back."""
    point = x.detach().requires_grad_()
    with torch.enable_grad():
        logits = network(point)

    def back(slope: Tensor) -> Tensor:
        return torch.autograd.grad(logits, point, slope)[0]

    return logits.detach(), back


class Parted:
    """A network whose `ahead` runs in parts. Called, it is the network itself."""

    def __init__(self, network: Network, device: torch.device, cuts: dict[int, tuple[int, ...]] | None = None) -> None:
        self.network, self.cuts = network, CUTS if cuts is None else cuts
        self.passes = getattr(network, "passes", None)  # the whole by hand, for those who do not want parts
        most = max((len(cut) for cut in self.cuts.values()), default=1)
        cuda = device.type == "cuda"
        self.tuned: set[tuple[int, ...]] = set()  # cuDNN times its kernels at first, and nobody is to disturb it
        self.streams = [torch.cuda.Stream(device) for _ in range(most - 1)] if cuda else []  # type: ignore[no-untyped-call]

    def __call__(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.network(x)

    def ahead(self, x: Tensor) -> tuple[Tensor, Back]:
        """As the function of this name."""
        cut = self.cuts.get(len(x))
        if cut is None:
            return ahead(self.network, x)
        alone = not self.streams or cut not in self.tuned
        self.tuned.add(cut)
        parts = torch.split(x, list(cut))
        found = self._side_by_side([partial(ahead, self.network, part) for part in parts], alone)

        def back(slope: Tensor) -> Tensor:
            ways = zip(found, torch.split(slope, list(cut)), strict=True)
            return torch.cat(self._side_by_side([partial(way, part) for (_, way), part in ways], alone))

        return torch.cat([logits for logits, _ in found]), back

    def _side_by_side(self, works: list[Callable[[], T]], alone: bool) -> list[T]:
        """The first on this stream and each other on one of its own, or all on this. It goes on when all are done."""
        if alone:
            return [work() for work in works]
        here, others = torch.cuda.current_stream(), self.streams[: len(works) - 1]
        done: list[T] = []
        for stream in others:
            stream.wait_stream(here)
        for work, stream in zip(works, [here, *others], strict=True):
            with torch.cuda.stream(stream):
                done.append(work())
        for stream in others:
            here.wait_stream(stream)
        return done
