"""Work captured once as a CUDA graph and replayed; without CUDA, work that is simply done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Streams, captures and kernels go to the current device: this makes it `device`, for the time of a block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def scarce(free: int, total: int) -> bool:
    """Whether torch should give back what it keeps: a capture cannot take memory from the warm-up's tensors."""
    return free < total / 2


@cache
def _side(device: int) -> torch.cuda.Stream:
    """Where captures are made: one stream, for torch has 32 in all, and one that came twice would wait for itself."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured:
    """A piece of work on fixed tensors. It is run a few times to warm up, captured, and from then on replayed."""

    def __init__(self, work: Callable[[], None], pool: Any, *, warm_up: int = 2) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.work = work
        if pool is None:
            return
        side = _side(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        if scarce(*torch.cuda.mem_get_info()):
            torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        # As torch.cuda.graph does it, which gives memory back each time: 0.15 s a graph, and an engine has a dozen.
        with torch.cuda.stream(side):
            # What other threads ask of the device in the meantime is their own affair.
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                self.graph.capture_end()

    def __call__(self) -> None:
        """Do it once more."""
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()
