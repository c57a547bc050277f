"""What is asked of CUDA to capture a piece of work, in which order; the device itself is played here."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sparring.engine import cuda_graphs
from sparring.engine.cuda_graphs import Captured, NotCapturable

GIB = 2**30


@pytest.fixture
def asked(monkeypatch):
    """What was asked of the device, with 100 of 141 GiB free."""
    calls: list[str] = []

    class Stream:
        def __init__(self, device: int = 0) -> None:
            pass

        def wait_stream(self, other) -> None:
            calls.append("wait")

    class Graph:
        def capture_begin(self, pool, capture_error_mode) -> None:
            calls.append(f"begin in {pool}, {capture_error_mode}")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    @contextmanager
    def stream(side):
        calls.append("aside")
        yield
        calls.append("back")

    played = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "stream": stream,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "synchronize": lambda: calls.append("synchronize"),
        "empty_cache": lambda: calls.append("empty"),
        "mem_get_info": lambda: (100 * GIB, 141 * GIB),
    }
    for name, part in played.items():
        monkeypatch.setattr(torch.cuda, name, part)
    cuda_graphs._side.cache_clear()
    yield calls
    cuda_graphs._side.cache_clear()


WARM_UP = ["wait", "aside", "work", "work", "back", "wait", "synchronize"]
CAPTURE = ["aside", "begin in pool, thread_local", "work", "end", "back"]


def test_work_is_warmed_up_aside_captured_and_replayed(asked):
    captured = Captured(lambda: asked.append("work"), "pool")
    assert asked == [*WARM_UP, *CAPTURE]
    captured()
    assert asked[-1] == "replay" and asked.count("work") == 3


def test_all_captures_are_made_on_one_stream(asked):
    assert cuda_graphs._side(0) is cuda_graphs._side(0) and cuda_graphs._side(1) is not cuda_graphs._side(0)


def test_memory_is_given_back_first_where_it_is_scarce(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 11 * GIB))
    Captured(lambda: asked.append("work"), "pool")
    assert asked == [*WARM_UP, "empty", *CAPTURE]


def test_a_capture_that_fails_is_ended(asked):
    def work() -> None:
        asked.append("work")
        if asked.count("work") > 2:
            raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        Captured(work, "pool")
    assert asked[-1] == "end"


def test_without_a_pool_it_is_simply_done(asked):
    Captured(lambda: asked.append("work"), None)()
    assert asked == ["work"]


@pytest.mark.parametrize("message", ["CUDA error: operation not permitted when stream is capturing", "no such kernel"])
def test_an_invalidated_capture_leaves_cuda_usable(asked, monkeypatch, message):
    """CUDA refuses to end it: torch's allocator has to leave the pool, and a clean capture resets the generator."""
    failing = [True]

    def end(graph) -> None:
        asked.append("end")
        if failing:
            failing.clear()
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def work() -> None:
        asked.append("work")
        if asked.count("work") > 2:
            raise RuntimeError(message)

    begin = lambda graph, **given: asked.append(f"begin in {given.get('pool')}")  # noqa: E731
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, name=name: asked.append(f"{name}{given}"), raising=False)
    monkeypatch.setattr(torch.cuda.Stream, "device", torch.device("cpu"), raising=False)
    with pytest.raises(NotCapturable, match="cannot be captured" if "capturing" in message else "no such kernel"):
        Captured(work, "pool")
    left = ["_cuda_endAllocateToPool(0, 'pool')", "_cuda_releasePool(0, 'pool')"]
    assert asked[len(WARM_UP) :] == [
        *("aside", "begin in pool", "work", "end", *left, "aside", "synchronize", "begin in None", "end", "back")
    ]


def test_a_capture_that_cannot_be_ended_is_reported(asked, monkeypatch):
    def end(graph) -> None:
        raise RuntimeError("unjoined work")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    with pytest.raises(NotCapturable, match="unjoined work"):
        Captured(lambda: None, "pool")
