"""Schedules: from the position in training to a value (learning rate, tau, eps).

The position is the epoch as a real number: epoch 1 begins at 1.0 and ends just below 2.0. A schedule is one line, on
the command line and in a recipe:

    0.1                       constant
    0.1,0.01@60,0.001@90      0.1, then 0.01 from epoch 60, then 0.001 from epoch 90
    0,1@40%,2@75%             the same with starts relative to the length of the run
    one-cycle:0.2             up linearly to 0.2 over 40 % of the run, then down to 0
    one-cycle:0.2@25%         with the peak at 25 %
    ramp:0..8/255@50%         linearly from 0 to 8/255 over the first half, then constant
    cosine:0.1                from 0.1 to 0 over the run, along half a cosine
    cosine:0.1..0.001         the same, down to 0.001
    warmup:5%+cosine:0.1      any schedule, times a factor that grows linearly from 0 to 1 over the first 5 %
    warmup:5+0.1,0.01@60      the same over the first 5 epochs
"""

from __future__ import annotations

import itertools
import math
from abc import ABC
from dataclasses import dataclass

from sparring.errors import UserError, did_you_mean

_NUMBERS = "0.031 or 8/255"  # examples that any field of a number takes
_EXAMPLES = {"tau": "0 or 0,1@40%", "lr": "0.1 or cosine:0.1", "awp": "0.005 or 0,0.005@10%"}


def number(text: str) -> float:
    """Parse a number: '0.031', '8/255', '2e-4'."""
    top, slash, bottom = text.partition("/")
    try:
        value = float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{text!r} is not a number. Write for example {_NUMBERS}.")
    return value


def with_examples_of(field: str, message: str) -> str:
    """The message of `number` with examples that the field takes: tau counts steps, a learning rate has a schedule."""
    return message.replace(f"for example {_NUMBERS}", f"for example {_EXAMPLES.get(field, _NUMBERS)}")


def spell(value: float) -> str:
    """The shortest text that `number` parses to the same float."""
    return str(int(value)) if value == int(value) else repr(value)


def pixels(value: float) -> str:
    """A radius for people to read: '8/255' for exactly 8/255, else the number: 0.031 is not 8/255, and 0.2 is 0.2."""
    short = f"{value:.6g}"
    if not abs(value) <= 255:  # no radius, and perhaps not even finite
        return short
    parts = round(value * 255)
    return f"{parts}/255" if parts and parts / 255 == value and float(short) != value else short


def radius_text(value: float, norm: str) -> str:
    """A radius with its norm, where that is not the usual one: '8/255', '0.5 (L2)'."""
    return pixels(value) if norm == "linf" else f"{pixels(value)} ({norm.upper()})"


def _written(schedule: object) -> str:
    """A schedule as a field takes it: 0.1 for a constant one, '0.1,0.01@60' for others."""
    text = str(schedule)
    try:
        float(text)
    except ValueError:
        return repr(text)
    return text


@dataclass(frozen=True)
class PieceStart:
    """The start of a piece: an epoch (1-based), or a fraction of the run."""

    at: float
    relative: bool = False

    def epoch(self, epochs: int) -> float:
        """The start as an epoch. A relative one is rounded to the nearest start of an epoch: 50% of 120 is epoch 61."""
        return 1.0 + round(self.at * epochs) if self.relative else self.at

    def __str__(self) -> str:
        return f"{spell(round(100 * self.at, 9))}%" if self.relative else spell(self.at)


@dataclass(frozen=True)
class Piecewise:
    """`first`, then the value of each piece from its start on."""

    first: float
    pieces: tuple[tuple[PieceStart, float], ...] = ()

    def at(self, position: float, epochs: int) -> float:
        """The value at a position in a run of `epochs` epochs."""
        value = self.first
        for start, after in self.pieces:
            if position >= start.epoch(epochs):
                value = after
        return value

    def values(self) -> tuple[float, ...]:
        """Every value that it takes."""
        return (self.first, *(value for _, value in self.pieces))

    def __repr__(self) -> str:
        return _written(self)

    def __str__(self) -> str:
        return ",".join([spell(self.first), *(f"{spell(value)}@{start}" for start, value in self.pieces)])


@dataclass(frozen=True)
class OneCycle:
    """Linear from 0 to `peak` at a fraction `top` of the run, then linear back to 0."""

    peak: float
    top: float = 0.4

    def at(self, position: float, epochs: int) -> float:
        """The value at a position in a run of `epochs` epochs."""
        done = min(max((position - 1.0) / epochs, 0.0), 1.0)
        return self.peak * (done / self.top if done < self.top else (1.0 - done) / (1.0 - self.top))

    def values(self) -> tuple[float, ...]:
        """The two values that bound it."""
        return (0.0, self.peak)

    def __repr__(self) -> str:
        return _written(self)

    def __str__(self) -> str:
        return f"one-cycle:{spell(self.peak)}@{spell(round(100 * self.top, 9))}%"


@dataclass(frozen=True)
class Ramp:
    """Linear from `first` to `last` over the fraction `until` of the run, then constant."""

    first: float
    last: float
    until: float = 1.0

    def at(self, position: float, epochs: int) -> float:
        """The value at a position in a run of `epochs` epochs."""
        done = min(max((position - 1.0) / (epochs * self.until), 0.0), 1.0)
        return self.first + (self.last - self.first) * done

    def values(self) -> tuple[float, ...]:
        """The two values that bound it."""
        return (self.first, self.last)

    def __repr__(self) -> str:
        return _written(self)

    def __str__(self) -> str:
        return f"ramp:{spell(self.first)}..{spell(self.last)}@{spell(round(100 * self.until, 9))}%"


@dataclass(frozen=True)
class Cosine:
    """From `first` to `last` over the run, along half a cosine."""

    first: float
    last: float = 0.0

    def at(self, position: float, epochs: int) -> float:
        """The value at a position in a run of `epochs` epochs."""
        done = min(max((position - 1.0) / epochs, 0.0), 1.0)
        return self.last + (self.first - self.last) * (1.0 + math.cos(math.pi * done)) / 2

    def values(self) -> tuple[float, ...]:
        """The two values that bound it."""
        return (self.first, self.last)

    def __repr__(self) -> str:
        return _written(self)

    def __str__(self) -> str:
        return f"cosine:{spell(self.first)}" + (f"..{spell(self.last)}" if self.last else "")


@dataclass(frozen=True)
class Warmup:
    """Another schedule, times a factor that grows linearly from 0 to 1 over the first `length` of the run."""

    length: float
    then: Piecewise | OneCycle | Ramp | Cosine
    relative: bool = False
    """Whether `length` is a fraction of the run; else it counts epochs."""

    def at(self, position: float, epochs: int) -> float:
        """The value at a position in a run of `epochs` epochs."""
        length = self.length * epochs if self.relative else self.length
        return self.then.at(position, epochs) * min(max((position - 1.0) / length, 0.0), 1.0)

    def values(self) -> tuple[float, ...]:
        """0, and every value of the other or the values that bound it."""
        return (0.0, *self.then.values())

    def __repr__(self) -> str:
        return _written(self)

    def __str__(self) -> str:
        length = f"{spell(round(100 * self.length, 9))}%" if self.relative else spell(self.length)
        return f"warmup:{length}+{self.then}"


Schedule = Piecewise | OneCycle | Ramp | Cosine | Warmup


def constant(value: float) -> Piecewise:
    """A schedule of one value."""
    return Piecewise(value)


def of(given: Schedule | float | str) -> Schedule:
    """A schedule from a schedule, its one-line form, or a number."""
    if isinstance(given, Schedule):
        return given
    return parse(given) if isinstance(given, str) else constant(number(str(given)))


_KINDS = {
    "one-cycle": "one-cycle:0.2",
    "cosine": "cosine:0.1",
    "warmup": "warmup:5%+cosine:0.1",
    "ramp": "ramp:0..8/255@50%",
}


def parse(text: str) -> Schedule:
    """Parse the one-line form of a schedule."""
    text = text.replace(" ", "")
    if text.startswith("warmup:"):
        return _warmup(text)
    if text.startswith("cosine:"):
        first, dots, last = text.removeprefix("cosine:").partition("..")
        return Cosine(number(first), number(last) if dots else 0.0)
    if text.startswith("one-cycle:"):
        peak, _, top = text.removeprefix("one-cycle:").partition("@")
        return OneCycle(number(peak), _fraction(top, text)) if top else OneCycle(number(peak))
    if text.startswith("ramp:"):
        span, _, until = text.removeprefix("ramp:").partition("@")
        first, dots, last = span.partition("..")
        if not dots:
            raise UserError(f"{text!r}: a ramp is written ramp:FIRST..LAST@50%.")
        return Ramp(number(first), number(last), _fraction(until, text) if until else 1.0)
    kind, colon, _ = text.partition(":")
    if colon:
        raise UserError(
            f"{text!r}: there is no schedule {kind!r}.{did_you_mean(kind, _KINDS)} Write for example "
            "0.1,0.01@60, one-cycle:0.2, cosine:0.1, warmup:5%+cosine:0.1 or ramp:0..8/255@50%."
        )
    if text in _KINDS:
        raise UserError(f"{text!r} is a schedule without its numbers. Write for example {_KINDS[text]}.")
    first, *rest = text.split(",")
    if "@" in first:
        raise UserError(f"{text!r}: the first value of a schedule has no start; write for example 0.1,0.01@60.")
    pieces = tuple(_piece(piece, text) for piece in rest)
    starts = [start for start, _ in pieces]
    if len({start.relative for start in starts}) > 1:
        raise UserError(f"{text!r}: starts are all epochs or all per cent. Write for example 0.1,0.01@60,0.001@90.")
    if any(after.at <= before.at for before, after in itertools.pairwise(starts)):
        raise UserError(f"{text!r}: the starts of a schedule must increase. Write for example 0.1,0.01@60,0.001@90.")
    return Piecewise(number(first), pieces)


def _warmup(text: str) -> Warmup:
    length, plus, rest = text.removeprefix("warmup:").partition("+")
    if not plus or rest.startswith("warmup:"):
        raise UserError(f"{text!r}: a warm-up is written warmup:LENGTH+SCHEDULE, e.g. warmup:5%+cosine:0.1.")
    then = parse(rest)
    assert not isinstance(then, Warmup)
    relative = length.endswith("%")
    value = number(length.removesuffix("%"))
    if value <= 0 or (relative and value > 100):
        raise UserError(f"{text!r}: a warm-up lasts some epochs or per cent of the run, above 0, got {length}.")
    return Warmup(value / 100 if relative else value, then, relative)


def _piece(piece: str, text: str) -> tuple[PieceStart, float]:
    value, at, start = piece.partition("@")
    if not at:
        raise UserError(f"{text!r}: every value after the first needs its start; write for example 0.1,0.01@60.")
    if start.endswith("%"):
        if not 0 < number(start[:-1]) <= 100:
            raise UserError(f"{text!r}: a start lies above 0% and at most at 100% of the run, got @{start}.")
        return PieceStart(number(start[:-1]) / 100, relative=True), number(value)
    if number(start) < 1:
        raise UserError(f"{text!r}: epochs count from 1, got @{start}.")
    return PieceStart(number(start)), number(value)


def _fraction(text: str, whole: str) -> float:
    # A one-cycle needs time to decrease again, a ramp may take the whole run.
    most = 99.9 if whole.startswith("one-cycle") else 100.0
    if not text.endswith("%") or not 0 < number(text[:-1]) <= most:
        raise UserError(f"{whole!r}: the part after @ is a percentage of the run, above 0% and at most {most:g}%.")
    return number(text[:-1]) / 100


def start_after(schedule: Schedule, epochs: int) -> PieceStart | None:
    """The first start of a schedule, given as an epoch, that a run of `epochs` epochs never reaches."""
    if isinstance(schedule, Warmup):
        if not schedule.relative and schedule.length > epochs:
            return PieceStart(1 + schedule.length)
        schedule = schedule.then
    starts = [start for start, _ in schedule.pieces] if isinstance(schedule, Piecewise) else []
    late = [start for start in starts if start.epoch(epochs) > epochs]
    return late[0] if late and not late[0].relative else None


def absolute_start(schedule: Schedule) -> PieceStart | None:
    """The first start of a schedule, or end of its warm-up, that is given as an epoch, not as a share of the run."""
    if isinstance(schedule, Warmup):
        return absolute_start(schedule.then) if schedule.relative else PieceStart(1 + schedule.length)
    pieces = schedule.pieces if isinstance(schedule, Piecewise) else ()
    return next((start for start, _ in pieces if not start.relative), None)


class Scheduled(ABC):  # noqa: B024 (schedules are registered with it, below)
    """A field of a frozen dataclass that holds a schedule and takes a number or its one-line form, too.

    Declared as `tau: Scheduled = Scheduled(0)`; read, it is a `Schedule`.
    """

    def __init__(self, default: Schedule | float | str) -> None:
        self.default = of(default)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Schedule:
        if instance is None:  # how a dataclass asks for the default
            return self.default
        value: Schedule = instance.__dict__[self.name]
        return value

    def __set__(self, instance: object, value: Schedule | float | str) -> None:
        try:
            instance.__dict__[self.name] = of(value)
        except UserError as error:
            raise UserError(f"{self.name}: {with_examples_of(self.name, str(error))}") from None


for _kind in (
    Piecewise,
    OneCycle,
    Ramp,
    Cosine,
    Warmup,
):  # so that a parser of typed fields sees that the default fits the field
    Scheduled.register(_kind)
