"""Several runs side by side on one device: the paper reports medians over trials, and one run leaves a GPU half empty.

Each run is a thread with a stream of its own; graphs of different runs fill one another's gaps. A run does not know
that it has company: its draws are named by its own seed, so what it computes is what it would compute alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring.config import Config
from sparring.errors import UserError
from sparring.train import Watch, train


def train_together(
    runs: Sequence[tuple[Config, Path]],
    *,
    at_once: int = 2,
    device: torch.device | str = "cpu",
    stop: Callable[[], bool] = lambda: False,
    watches: Sequence[Watch] | None = None,
    **given: Any,
) -> list[nn.Module]:
    """Train every (configuration, folder), `at_once` at a time, and return the models in order.

    The first run that fails stops the others, which save their place; its error is raised.

    Args:
        watches: one for each run.
        given: what else `train` takes: data, resume, overwrite, engine, tensorboard.
    """
    if at_once < 1:
        raise UserError(f"at_once must be at least 1, got {at_once}.")
    device = torch.device(device)
    failed = threading.Event()

    def one(config: Config, folder: Path, watch: Watch | None) -> nn.Module:
        with _own_stream(device):
            return train(config, folder, device=device, watch=watch, stop=lambda: failed.is_set() or stop(), **given)

    with _quick_turns(), ThreadPoolExecutor(at_once, thread_name_prefix="run") as pool:
        lookers: Sequence[Watch | None] = watches or [None] * len(runs)
        tasks = [pool.submit(one, *run, watch) for run, watch in zip(runs, lookers, strict=True)]
        try:
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in done:
                if task.exception() is not None:
                    raise task.exception() or AssertionError
        except BaseException:
            failed.set()
            for task in tasks:
                task.cancel()
            raise
    return [task.result() for task in tasks]


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Python lets a thread run for 5 ms before another may ask; a step takes less than one."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
