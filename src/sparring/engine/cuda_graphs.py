"""Work captured once as a CUDA graph and replayed, or done beside other work; without CUDA it is simply done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


class Beside:
    """Work that needs nothing of what is still running, on a stream of its own. Its results lie in fixed places.

    It may begin as soon as those have been read who read them last, however much is to run behind that.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.last: torch.cuda.Event | None = None  # when the results had been read

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched in this block runs beside; what is launched behind it waits for it."""
        if self.stream is None:
            yield
            return
        here, last = torch.cuda.current_stream(), self.last
        self.overwritten()  # a batch that breaks off never says that it has read
        if last is None:
            self.stream.wait_stream(here)
        else:
            self.stream.wait_event(last)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            here.wait_stream(self.stream)

    def overwritten(self) -> None:
        """Somebody writes where the results lie: the next block waits for all that was launched before it."""
        self.last = None

    def read(self) -> None:
        """Nothing that is launched from here on reads the results of the last block."""
        if self.stream is not None:
            self.last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.last.record()
