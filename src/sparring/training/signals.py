"""Ctrl-C, SIGTERM and a closed terminal raise a flag while a run trains, so that it stops after a step and saves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from sparring.training import torchrun

_received: list[int] = []  # signals that asked this process to stop, in order


def note(number: int) -> None:
    """Remember a signal that asked the process to stop."""
    _received.append(number)


def last() -> int:
    """The number of the last signal that asked this process to stop; 0 for none."""
    return _received[-1] if _received else 0


def by_ctrl_c() -> bool:
    """Whether it was Ctrl-C that last asked the process to stop; so it was where no signal is known."""
    return not _received or _received[-1] == signal.SIGINT


class Flag:
    """Raised by a signal; returns whether it is raised."""

    def __init__(self, *, quiet: bool = False, patient: bool = False) -> None:
        """`quiet`: another process reports the stop. `patient`: a second Ctrl-C changes nothing."""
        self.up, self.quiet, self.patient = False, quiet, patient

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.up

    def raised(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        note(number)
        if self.up and number == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        if not self.up:
            self.up = True
            if not self.quiet:
                _report_stop(number, again=not self.patient)


@contextmanager
def stopping() -> Iterator[Flag]:
    """Let Ctrl-C, SIGTERM and a closed terminal raise a flag instead of an exception; a second Ctrl-C interrupts.

    Afterwards the handlers are the caller's again. Signals reach the main thread alone: in another the flag stays down.
    Under torchrun a second one changes nothing: torchrun itself ends what has not ended 30 s after the first.
    """
    flag = Flag(quiet=torchrun.rank() > 0, patient=torchrun.launched())
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # not under nohup
    numbers = [number for number in numbers if signal.getsignal(number) is not None]  # Python could not restore it
    previous = {number: signal.signal(number, flag.raised) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _report_stop(number: int, *, again: bool = True) -> None:
    """Report at once, for a step may take seconds. Written raw: a signal handler may interrupt another print."""
    how = "; press Ctrl-C again to stop at once, without saving" if again and number == signal.SIGINT else ""
    with suppress(OSError):  # a terminal that has been closed
        below = "\n" if os.isatty(2) else ""  # below the progress bar and the ^C
        os.write(2, f"{below}sparring: stopping after this step{how}\n".encode())
