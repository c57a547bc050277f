"""The input gradient of a batch as those of two parts, side by side on two streams.

cuDNN cuts a convolution into tiles of a fixed size, and the last round of tiles leaves processors idle; so do the
memory-bound operations between two convolutions. The kernels of the other part fill these gaps. The parts meet twice:
at the logits, and when the images move. Which batch sizes are split is fixed by a table (triton/tuning.py) and not by a
clock, so that two runs of one seed are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from sparring.attacks.checks import Model

T = TypeVar("T")
Back = Callable[[Tensor], Tensor]  # the gradient at the logits to that at the images


def ahead(network: Model, x: Tensor) -> tuple[Tensor, Back]:
    """The logits, and the backward pass to the images."""
    point = x.detach().requires_grad_()
    with torch.enable_grad():
        logits = network(point)

    def back(output_gradient: Tensor) -> Tensor:
        return torch.autograd.grad(logits, point, output_gradient)[0]

    return logits.detach(), back


class SplitBatch:
    """A network whose `ahead` runs in parts. Called, it is the network itself."""

    def __init__(self, network: Model, device: torch.device, cuts: Mapping[int, tuple[int, ...]]) -> None:
        """`cuts` maps a batch size to the sizes of its parts."""
        self.network, self.cuts = network, cuts
        self.manual = getattr(network, "manual", None)  # the undivided hand-written network
        most = max((len(cut) for cut in self.cuts.values()), default=1)
        cuda = device.type == "cuda"
        self.tuned: set[tuple[int, ...]] = set()  # cuDNN times its kernels at first: nothing may run beside it then
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

        def back(output_gradient: Tensor) -> Tensor:
            each = zip(found, torch.split(output_gradient, list(cut)), strict=True)
            return torch.cat(self._side_by_side([partial(back_of, part) for (_, back_of), part in each], alone))

        return torch.cat([logits for logits, _ in found]), back

    def _side_by_side(self, works: list[Callable[[], T]], alone: bool) -> list[T]:
        """Run the first on this stream and each other on its own, or all on this one; later work waits for all."""
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
