"""Ctrl-C, SIGTERM and a closed terminal: a clean stop, and the exit code that says which it was."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from sparring.errors import Cancelled, RunFailed

_received: list[int] = []  # signals that asked this process to stop, in order


def note(number: int) -> None:
    """Remember a signal that asked the process to stop."""
    _received.append(number)


def stopped(message: str) -> RunFailed:
    """The failure of a command that was asked to stop: by Ctrl-C (exit 130), or in another way (exit 1)."""
    by_ctrl_c = not _received or _received[-1] == signal.SIGINT
    return Cancelled(message) if by_ctrl_c else RunFailed(message)


class Flag:
    """Raised by a signal; returns whether it is raised."""

    def __init__(self) -> None:
        self.up = False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.up

    def raised(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        note(number)
        if self.up and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.up:
            self.up = True
            _report_stop(number)


@contextmanager
def stopping() -> Iterator[Flag]:
    """Let Ctrl-C, SIGTERM and a closed terminal raise a flag instead of an exception; a second Ctrl-C interrupts."""
    flag = Flag()
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # not under nohup
    previous = {number: signal.signal(number, flag.raised) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


def _report_stop(number: int) -> None:
    """Report at once, for a step may take seconds. Written raw: a signal handler may interrupt another print."""
    again = "; press Ctrl-C again to stop at once, without saving" if number == signal.SIGINT else ""
    with suppress(OSError):  # a terminal that has been closed
        below = "\n" if os.isatty(2) else ""  # below the progress bar and the ^C
        os.write(2, f"{below}sparring: stopping after this step{again}\n".encode())
