"""The exit code that says how a command was stopped, and evaluations that a signal or the clock interrupts."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sparring.errors import Cancelled, RunFailed
from sparring.training.signals import by_ctrl_c, note


def stopped(message: str) -> RunFailed:
    """The failure of a command that was asked to stop: by Ctrl-C (exit 130), or in another way (exit 1)."""
    return Cancelled(message) if by_ctrl_c() else RunFailed(message)


@contextmanager
def breakable(until: float) -> Iterator[None]:
    """Let the clock, Ctrl-C and SIGTERM interrupt a block anywhere: an evaluation keeps its verdicts as it goes."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        note(number)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)}
    try:
        if until < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, until - time.monotonic()))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
