"""Work captured once as a CUDA graph and replayed, or run on a side stream; without CUDA it simply runs.

A capture that fails leaves CUDA usable and raises `NotCapturable` with the reason, so that the caller can run the same
work uncaptured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import torch


class NotCapturable(RuntimeError):
    """Work that runs but cannot be captured as a CUDA graph. The message is the reason."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one inside a block: streams, captures and kernels go to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pool_for(device: torch.device) -> Any:
    """A memory pool for captures on a device; None, which runs work uncaptured, where there is no CUDA."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def scarce(free: int, total: int) -> bool:
    """Whether torch should release its cached memory: a capture cannot reuse what the warm-up left in the cache."""
    return free < total / 2


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else ""
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _spelled(state: Any) -> tuple[Any, ...]:
    """A state of numpy's generator, to compare: its numbers and its place in them."""
    return (state[1].tobytes(), *state[2:])


@contextmanager
def draws_on_the_host() -> Iterator[Callable[[], bool]]:
    """Put numpy's and Python's global generators back after a block; what is yielded says whether it drew from them."""
    numbers, choices = np.random.get_state(), random.getstate()
    before, moved = _spelled(numbers), False
    try:
        yield lambda: moved
        moved = _spelled(np.random.get_state()) != before or random.getstate() != choices
    finally:
        np.random.set_state(numbers)
        random.setstate(choices)


@cache
def _side(device: int) -> torch.cuda.Stream:
    """The stream for captures. Only one: torch has 32 in all, and a stream handed out twice would wait for itself."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured:
    """Work on fixed tensors: run a few times to warm up, captured, and replayed from then on."""

    def __init__(self, work: Callable[[], None], pool: Any, *, warm_up: int = 2) -> None:
        """Capture into the memory pool `pool`; None runs the work uncaptured. Errors of the warm-up are the work's."""
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
        # As torch.cuda.graph does it, but without releasing memory each time: 0.15 s a graph, and there are a dozen.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            # Other threads may call CUDA in the meantime: their calls do not count.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except Exception as error:
                _abandon(graph, side, pool)
                raise NotCapturable(_why(error)) from error
            except BaseException:
                _abandon(graph, side, pool)
                raise
            try:
                graph.capture_end()
            except Exception as error:
                _repair(side)
                raise NotCapturable(_why(error)) from error
        self.graph = graph

    def __call__(self) -> None:
        """Run the work once more."""
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()


def _why(error: BaseException) -> str:
    """The reason why a capture failed. CUDA refuses whatever makes the host wait for the device."""
    if "captur" in str(error):
        return f"it makes the host wait for the GPU, which cannot be captured ({reason(error)})"
    return reason(error)


def _abandon(graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream, pool: Any) -> None:
    """End a capture whose work has failed, on its own stream.

    CUDA may have invalidated the capture; then capture_end() raises before torch's allocator has left the pool, and a
    later empty_cache() would fail.
    """
    try:
        graph.capture_end()
    except Exception:
        device = torch.cuda.current_device()
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(Exception):  # it had left the pool: depends on the version of torch
                getattr(torch._C, name)(device, pool)
        _repair(side)


def _repair(side: torch.cuda.Stream) -> None:
    """Take torch's random generator out of capture mode, where a failed capture leaves it: a clean capture does it."""
    with suppress(Exception), torch.cuda.stream(side):
        torch.cuda.synchronize()
        spare = torch.zeros(1, device=side.device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        spare.zero_()
        graph.capture_end()
