"""The calls to CUDA that capture a piece of work, and their order; the device is a fake."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sparring.engine import cuda_graphs
from sparring.engine.cuda_graphs import Captured, NotCapturable, draws_on_the_host

GIB = 2**30


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[str]]:
    """The calls to the device, which has 100 of 141 GiB free."""
    made: list[str] = []

    class Stream:
        def __init__(self, device: int = 0) -> None:
            pass

        def wait_stream(self, other) -> None:
            made.append("wait")

    class Graph:
        def capture_begin(self, pool, capture_error_mode) -> None:
            made.append(f"begin in {pool}, {capture_error_mode}")

        def capture_end(self) -> None:
            made.append("end")

        def replay(self) -> None:
            made.append("replay")

    @contextmanager
    def stream(side):
        made.append("enter side stream")
        yield
        made.append("leave side stream")

    fakes = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "stream": stream,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "synchronize": lambda: made.append("synchronize"),
        "empty_cache": lambda: made.append("empty"),
        "mem_get_info": lambda: (100 * GIB, 141 * GIB),
    }
    for name, part in fakes.items():
        monkeypatch.setattr(torch.cuda, name, part)
    cuda_graphs._side.cache_clear()
    yield made
    cuda_graphs._side.cache_clear()


WARM_UP = ["wait", "enter side stream", "work", "work", "leave side stream", "wait", "synchronize"]
CAPTURE = ["enter side stream", "begin in pool, thread_local", "work", "end", "leave side stream"]


def test_work_is_warmed_up_captured_and_replayed(calls):
    captured = Captured(lambda: calls.append("work"), "pool")
    assert calls == [*WARM_UP, *CAPTURE]
    captured()
    assert calls[-1] == "replay" and calls.count("work") == 3


def test_captures_share_one_stream_per_device(calls):
    assert cuda_graphs._side(0) is cuda_graphs._side(0) and cuda_graphs._side(1) is not cuda_graphs._side(0)


def test_cache_is_emptied_before_a_capture_if_memory_is_low(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 11 * GIB))
    Captured(lambda: calls.append("work"), "pool")
    assert calls == [*WARM_UP, "empty", *CAPTURE]


def test_failed_capture_is_ended(calls):
    def work() -> None:
        calls.append("work")
        if calls.count("work") > 2:
            raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        Captured(work, "pool")
    assert calls[-1] == "end"


def test_without_a_pool_work_runs_directly(calls):
    Captured(lambda: calls.append("work"), None)()
    assert calls == ["work"]


@pytest.mark.parametrize("message", ["CUDA error: operation not permitted when stream is capturing", "no such kernel"])
def test_invalidated_capture_leaves_cuda_usable(calls, monkeypatch, message):
    """CUDA refuses to end it: torch's allocator has to leave the pool, and a clean capture resets the generator."""
    failing = [True]

    def end(graph) -> None:
        calls.append("end")
        if failing:
            failing.clear()
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def work() -> None:
        calls.append("work")
        if calls.count("work") > 2:
            raise RuntimeError(message)

    begin = lambda graph, **given: calls.append(f"begin in {given.get('pool')}")  # noqa: E731
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, name=name: calls.append(f"{name}{given}"), raising=False)
    monkeypatch.setattr(torch.cuda.Stream, "device", torch.device("cpu"), raising=False)
    with pytest.raises(NotCapturable, match="cannot be captured" if "capturing" in message else "no such kernel"):
        Captured(work, "pool")
    left = ["_cuda_endAllocateToPool(0, 'pool')", "_cuda_releasePool(0, 'pool')"]
    assert calls[len(WARM_UP) :] == [
        *("enter side stream", "begin in pool", "work", "end", *left),
        *("enter side stream", "synchronize", "begin in None", "end", "leave side stream"),
    ]


def test_capture_that_cannot_be_ended_is_reported(calls, monkeypatch):
    def end(graph) -> None:
        raise RuntimeError("unjoined work")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    with pytest.raises(NotCapturable, match="unjoined work"):
        Captured(lambda: None, "pool")


def test_draws_on_the_host_are_noticed_and_put_back():
    for draw in (lambda: None, lambda: random.random(), lambda: np.random.rand()):
        before = random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]
        with draws_on_the_host() as drawn:
            moved = draw() is not None
        assert drawn() == moved
        assert (random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]) == before
