"""Progress of a training: a bar on a terminal, a line per minute elsewhere, and a line per finished epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sparring.schedules import radius_text
from sparring.training.config import Config

EVERY = 60.0  # seconds between two lines of a log
_REFRESH = 0.5  # seconds between reads of the mean, each of which synchronises with the GPU
_UNKNOWN = "-:--:--"
_PATIENCE = 2  # consecutive epochs of predicting a single class before a note is printed


def _clock(seconds: float) -> str:
    """'3:05:09'."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class TrainingBar:
    """Tracks a training on a console, standard error unless given. Without a terminal there is no bar.

    `lines` prints a line per epoch.
    """

    def __init__(self, console: Console | None = None, *, title: str = "", lines: bool = True) -> None:
        self.console = console or Console(stderr=True, markup=False)
        self.title, self.lines = title, lines
        self.live = self.console.is_terminal
        self.progress: Progress | None = None
        self.read = 0.0
        self.steps = self.constant = 0
        self.since: tuple[int, float] | None = None

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Training begins or resumes at this epoch."""
        self.steps, self.epochs = steps, config.epochs
        self.printed = time.perf_counter()
        if self.lines:
            self._print(engine)
            self._print(
                f"validation after every epoch: {config.validation:,} held-out images, natural and under PGD-10 at "
                f"eps {radius_text(config.validation_radius, config.objective.norm)}"
            )
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[backprops]}"),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[left]}", style="progress.remaining"),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.progress.start()
        done = (epoch - 1) * steps
        self.task = self.progress.add_task(
            self._describe(epoch), total=config.epochs * steps, completed=done, backprops="", left=_UNKNOWN
        )

    def _describe(self, epoch: int) -> str:
        return f"{self.title}epoch {min(epoch, self.epochs)}/{self.epochs}"

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """A step is done."""
        assert self.progress is not None
        done = (epoch - 1) * self.steps + step
        now = time.perf_counter()
        left = self._left(done, now)
        if self.live and now - self.read > _REFRESH:
            self.read = now
            self.progress.update(self.task, backprops=f"{backprops():.1f} BPs")
        if self.lines and not self.live and now - self.printed > EVERY:
            self.printed = now
            self._print(f"{self._describe(epoch)}  step {step} of {self.steps}  {backprops():.1f} BPs  {left} left")
        self.progress.update(self.task, completed=done, description=self._describe(epoch), left=left)

    def _left(self, done: int, now: float) -> str:
        """The time left, by the mean speed since the first step of this start (that step may include compilation)."""
        if self.since is None:
            self.since = done, now
            return _UNKNOWN
        first, began = self.since
        return _clock((now - began) / (done - first) * (self.epochs * self.steps - done))

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """An epoch is done."""
        if not self.lines:
            return
        self.printed = time.perf_counter()
        tau = "" if record["tau"] is None else f"  tau {record['tau']}"
        self._print(
            f"{self.title}epoch {record['epoch']:3}  loss {record['loss']:.3f}  natural {record['natural']:6.1%}  "
            f"PGD-10 {record['pgd10']:6.1%}  {record['backprops']:4.1f} BPs{tau}  {record['seconds']:.1f} s  "
            f"{record['images_per_second']:.0f} images/s{'  best' if best else ''}"
        )
        self.constant = self.constant + 1 if record.get("one_class") else 0
        if self.constant == _PATIENCE:
            self._print(
                f"note: for {_PATIENCE} epochs the model has predicted one class for every validation image. If that "
                "persists, units are dead or the attack is too strong at first: try another --seed or a lower --lr."
            )

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Training stops."""
        if self.progress is not None:
            self.progress.stop()
