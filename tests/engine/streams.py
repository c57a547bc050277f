"""Stand-ins for streams and captures: what waits for what, and what is launched where, without a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from sparring.engine.cuda_graphs import Captured


class Streams:
    """`log` has everything in order; `make` returns a stream; the first current one is called main."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[str] = []
        self.stack = [self.make("main")]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stack[-1])
        monkeypatch.setattr(torch.cuda, "stream", self._entered)

    def make(self, name: str):
        log = self.log

        class Stream:
            def wait_stream(self, other) -> None:
                log.append(f"{name} waits for {other.name}")

            def synchronize(self) -> None:
                log.append(f"all wait for {name}")

        Stream.name = name
        return Stream()

    @contextmanager
    def _entered(self, stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def say(self, what: str) -> None:
        self.log.append(f"{self.stack[-1].name}: {what}")

    def take(self) -> list[str]:
        """The log since the last call."""
        taken, self.log[:] = list(self.log), []
        return taken


class Warm(Captured):
    """A capture that warms up, as on a GPU, and replays by doing its work."""

    def __init__(self, work, pool):
        super().__init__(work, None)
        work()
        work()
