"""Work done ahead of its use: a thread that gathers images on the host, and copies to the GPU one chunk ahead.

On a CPU the thread alone is used. On a GPU the thread fills pinned buffers and makes no CUDA call (one would break a
graph capture of the main thread); the main thread starts the copy of the next chunk on a side stream before it hands
out the current one, so that the copy runs beside the training step. Must not know what the images are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, Full, Queue
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")
DEPTH = 2  # chunks that are ready beside the one in use
_PATIENCE = 0.05  # seconds after which a waiting thread looks whether it is still wanted


class Filled(NamedTuple):
    """Images on the host, and what to call once they have been copied."""

    x: Tensor
    release: Callable[[], None] = lambda: None


def ahead(items: Iterator[T], depth: int = DEPTH, *, done: threading.Event | None = None) -> Iterator[T]:
    """The same items, made by a thread up to `depth` ahead. An error of the thread is raised in its place.

    Args:
        done: set once nothing more is wanted, for items that wait for something themselves.
    """
    ready: Queue[tuple[str, Any]] = Queue(maxsize=depth)
    done = done or threading.Event()

    def hand_over(kind: str, value: object) -> None:
        while not done.is_set():
            try:
                ready.put((kind, value), timeout=_PATIENCE)
            except Full:
                continue
            return

    def work() -> None:
        try:
            for item in items:
                hand_over("item", item)
                if done.is_set():
                    return
            hand_over("end", None)
        except BaseException as error:  # whatever it is, it belongs to the caller
            hand_over("error", error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        done.set()
        while True:  # free a thread that waits for room
            try:
                ready.get_nowait()
            except Empty:
                break
        thread.join(timeout=10)


def gathered(
    x: Tensor, rows: Sequence[Tensor], *, pin: bool, again: bool | None = None, depth: int = DEPTH
) -> Iterator[Filled]:
    """The images x[rows] of every chunk, contiguous, gathered by a thread.

    Args:
        pin: whether to gather into pinned memory, for copies to a GPU.
        again: whether chunks share a few buffers, each used again once it is released; as `pin` unless given.
    """
    if not rows:
        return
    again = pin if again is None else again
    free: Queue[Tensor] = Queue()
    done = threading.Event()
    if again:
        most = max(len(these) for these in rows)
        for _ in range(depth + 3):  # ready ones, one being filled, two on their way to the device
            free.put(torch.empty(most, *x.shape[1:], dtype=x.dtype, pin_memory=pin))

    def buffer(count: int) -> Tensor:
        while not done.is_set():
            try:
                return free.get(timeout=_PATIENCE)
            except Empty:
                continue
        return torch.empty(count, *x.shape[1:], dtype=x.dtype)  # nobody will look at it

    def fill() -> Iterator[Filled]:
        for these in rows:
            if not again:
                yield Filled(x[these].contiguous())
                continue
            whole = buffer(len(these))
            yield Filled(torch.index_select(x, 0, these, out=whole[: len(these)]), lambda used=whole: free.put(used))  # type: ignore[misc]

    yield from ahead(fill(), depth, done=done)


def one_ahead(items: Iterator[T], start: Callable[[T], U], finish: Callable[[U], Tensor]) -> Iterator[Tensor]:
    """finish(start(item)) of every item; each is started before the one before it is handed out."""
    flying: list[U] = []
    for item in items:
        flying.append(start(item))
        if len(flying) == 2:
            yield finish(flying.pop(0))
    for last in flying:
        yield finish(last)


def on_device(chunks: Iterator[Filled], device: torch.device) -> Iterator[Tensor]:
    """The chunks on `device`, copied beside the work of the current stream where it is a GPU."""
    if device.type != "cuda":
        for filled in chunks:
            x = filled.x.to(device)
            filled.release()
            yield x
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(filled: Filled) -> tuple[Tensor, torch.cuda.Event, Callable[[], None]]:
        with torch.cuda.stream(side):
            x = filled.x.to(device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(side)
        return x, copied, filled.release

    def finish(flying: tuple[Tensor, torch.cuda.Event, Callable[[], None]]) -> Tensor:
        x, copied, release = flying
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        x.record_stream(current)
        copied.synchronize()  # started a chunk ago: done, as a rule
        release()
        return x

    yield from one_ahead(chunks, start, finish)
