"""The progress of an evaluation: bars on a terminal, elsewhere a line a minute. Knows no attack."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparring.training.progress import EVERY

Advance = Callable[[float], None]  # by a number of images
Task = Callable[[str, int | None], Advance]  # (what, number of images or None) -> advance


class BySteps:
    """Advances within a batch too, by a part of its images at every step: a batch may take minutes on a CPU."""

    def __init__(self, advance: Advance, steps: int) -> None:
        self.advance, self.steps, self.ahead = advance, steps, 0.0

    def __call__(self, images: float) -> None:
        """A step of a batch of `images`."""
        self.advance(images / self.steps)
        self.ahead += images / self.steps

    def finish(self, images: int) -> None:
        """A batch is done: what is left of it counts; steps of a batch that did not fit into memory do not."""
        self.advance(images - self.ahead)
        self.ahead = 0.0


@contextmanager
def meter(shown: bool) -> Iterator[Task]:
    """Report, where it is wanted, which attack runs and on how many images."""
    console = Console(stderr=True)
    if not shown:
        yield lambda what, total: lambda by: None
    elif console.is_terminal:
        with _bars(console) as task:
            yield task
    else:
        with _lines() as task:
            yield task


@contextmanager
def _bars(console: Console) -> Iterator[Task]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:

        def task(what: str, total: int | None) -> Advance:
            number = bar.add_task(what, total=total)
            return lambda by: bar.advance(number, by)

        yield task


@dataclass
class _Place:
    what: str = "preparing"
    total: int | None = None
    done: float = 0

    def advance(self, by: float) -> None:
        self.done += by

    def __str__(self) -> str:
        return self.what if self.total is None else f"{self.what}: {round(self.done)} of {self.total} images"


@contextmanager
def _lines() -> Iterator[Task]:
    """Print from a thread, once a minute."""
    place, over, began = _Place(), threading.Event(), time.monotonic()

    def task(what: str, total: int | None) -> Advance:
        nonlocal place
        place = _Place(what, total)
        return place.advance

    def report() -> None:
        while not over.wait(EVERY):
            minutes = (time.monotonic() - began) / 60
            with suppress(OSError, ValueError):  # a closed pipe is handled where the result is printed
                print(f"{place}, after {minutes:.0f} min", flush=True)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield task
    finally:
        over.set()
        reporter.join()
