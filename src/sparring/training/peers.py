"""Notices that another process of a run has ended, where a collective would wait for it without end.

Every process counts up a number in the store that they share, and watches that of the next one; a number that stands
still ends all. A connection that breaks is noticed sooner, by the collective itself. Knows no training.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

EVERY = 2.0  # seconds between two beats
SILENT = 24.0  # seconds without a beat after which a process counts as ended
_DONE = b"done"
_PAUSE = 5.0  # seconds more between two beats than there should be: the process itself was not running


class Peers:
    """A thread that beats for this process and watches the next one."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """`store`: torch's, in which every process of the group can set and read."""
        self.store, self.rank, self.size = store, rank, size
        self.next = (rank + 1) % size
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def __enter__(self) -> Peers:
        if self.size > 1:
            self.store = self.store.clone() if hasattr(self.store, "clone") else self.store  # its own connection
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.ended.set()

    def finish(self) -> None:
        """This process needs the others no more, and they need not watch it."""
        self.ended.set()
        if self.size > 1:
            self.thread.join(2 * EVERY)
            try:
                self.store.set(_beat(self.rank), _DONE)
            except RuntimeError:  # the store has ended with the first process, which was done as well
                return

    def speaks(self) -> bool:
        """Whether this is the first process to report that one has ended; so it is where the store is gone, too."""
        try:
            return bool(self.store.add("reported", 1) == 1)
        except RuntimeError:
            return True

    def _watch(self) -> None:
        beats, seen, since = 0, b"", time.monotonic()
        woke = since
        while not self.ended.wait(EVERY):
            now = time.monotonic()
            stood_still, woke = now - woke > EVERY + _PAUSE, now
            try:
                beats += 1
                self.store.set(_beat(self.rank), str(beats))
                gone = self.store.check(["gone"])
                there = self.store.get(_beat(self.next)) if self.store.check([_beat(self.next)]) else b""
            except RuntimeError:  # the store ended with the process, or the machine, that held it
                gone, there = True, b""
            if there != seen or stood_still:  # a job that was suspended wakes up one process after the other
                seen, since = there, now
            if not gone and seen != _DONE and now - since > SILENT:
                gone = True
                with suppress(RuntimeError):
                    self.store.set("gone", str(self.next))
            if gone and not self.ended.is_set():
                self._end()

    def _end(self) -> None:
        """End this process, whose main thread may wait for a GPU that waits for another."""
        if self.speaks():
            print(
                "sparring: another process of this run has ended, so this one ends too. Nothing that was saved is "
                "lost: give the same command again, and to a training --resume.",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)


def _beat(rank: int) -> str:
    return f"beat/{rank}"
