"""Fake streams and captures: they record what waits for what and what is launched where, without a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from sparring.engine.cuda_graphs import Captured


class Streams:
    """`log` holds all events in order; `make` returns a stream; the initial current stream is called main."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[str] = []
        self.stack = [self.make("main")]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stack[-1])
        monkeypatch.setattr(torch.cuda, "stream", self._entered)
        monkeypatch.setattr(torch.cuda, "Event", self._event)

    def make(self, name: str):
        log = self.log

        class Stream:
            def wait_stream(self, other) -> None:
                log.append(f"{name} waits for {other.name}")

            def wait_event(self, event) -> None:
                log.append(f"{name} waits for event {event.number}")

            def synchronize(self) -> None:
                log.append(f"all wait for {name}")

        Stream.name = name
        return Stream()

    def _event(self):
        streams = self

        class Event:
            def record(self) -> None:
                self.number = sum("event" in line and "waits" not in line for line in streams.log)
                streams.record(f"event {self.number}")

        return Event()

    @contextmanager
    def _entered(self, stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def record(self, what: str) -> None:
        self.log.append(f"{self.stack[-1].name}: {what}")

    def take(self) -> list[str]:
        """Return and clear the log."""
        lines, self.log[:] = list(self.log), []
        return lines


class Warm(Captured):
    """A capture that warms up, as on a GPU, and replays by running its work."""

    def __init__(self, work, pool):
        super().__init__(work, None)
        work()
        work()
