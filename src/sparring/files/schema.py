"""Declarations of what a value read from a file must look like: types, ranges, sizes.

A check takes a value and returns what is wrong with it in words ("epoch must be a whole number from 0 to 9, got 'x'"),
or an empty string. Checks are composed: `fields(epoch=whole(), loss=number())`. Knows no file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection

from sparring.files.regular import shown

Check = Callable[[object], str]
BIG = 2**53  # beyond it a whole number does not survive other readers of JSON


def whole(low: int = 0, high: int = BIG) -> Check:
    """A whole number in a range; True is none."""

    def check(value: object) -> str:
        if type(value) is int and low <= value <= high:
            return ""
        return _must(f"be a whole number from {low} to {high}", value)

    return check


def number(low: float = -math.inf, high: float = math.inf, *, finite: bool = True) -> Check:
    """A number in a range, finite unless told otherwise (then NaN passes)."""

    def check(value: object) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            small = abs(value) <= sys.float_info.max  # a whole number can be too large for a float
            if (small and low <= value <= high) or (isinstance(value, float) and not small and not finite):
                return ""
        bounds = "" if (low, high) == (-math.inf, math.inf) else f" from {low:g} to {high:g}"
        return _must(f"be a {'finite ' if finite else ''}number{bounds}", value)

    return check


def text(most: int = 10_000) -> Check:
    """A text of at most `most` characters."""

    def check(value: object) -> str:
        return "" if isinstance(value, str) and len(value) <= most else _must(f"be a text of up to {most:,}", value)

    return check


def flag(value: object) -> str:
    """True or false."""
    return "" if isinstance(value, bool) else _must("be true or false", value)


def anything(value: object) -> str:
    """Whatever JSON can hold."""
    return ""


def one_of(*allowed: object) -> Check:
    """One of a few values."""

    def check(value: object) -> str:
        found = any(type(value) is type(known) and value == known for known in allowed)
        return "" if found else _must(f"be one of {', '.join(map(repr, allowed))}", value)

    return check


def both(*checks: Check) -> Check:
    """What all of the checks take: types first, then what the parts must be to one another."""
    return lambda value: next((wrong for one in checks if (wrong := one(value))), "")


def nothing_or(check: Check) -> Check:
    """Null, or what another check takes."""
    return lambda value: "" if value is None else check(value)


def either(*checks: Check) -> Check:
    """What at least one of the checks takes; the complaint is that of the last."""

    def check(value: object) -> str:
        wrong = ""
        for one in checks:
            wrong = one(value)
            if not wrong:
                break
        return wrong

    return check


def items(item: Check, *, least: int = 0, most: int = 1_000_000) -> Check:
    """A list with a bounded number of entries."""

    def check(value: object) -> str:
        if not isinstance(value, list) or not least <= len(value) <= most:
            return _must(f"be a list of {least} to {most:,} entries", value)
        return next((f"entry {place + 1}: {wrong}" for place, entry in enumerate(value) if (wrong := item(entry))), "")

    return check


def table(item: Check, *, most: int = 100_000) -> Check:
    """An object whose names are free and whose values all pass one check."""

    def check(value: object) -> str:
        if not isinstance(value, dict) or len(value) > most:
            return _must(f"be an object of up to {most:,} entries", value)
        return next((f"{shown(name)}: {wrong}" for name, entry in value.items() if (wrong := item(entry))), "")

    return check


def fields(*, optional: Collection[str] = (), others: Check | None = None, **checks: Check) -> Check:
    """An object with the given fields.

    Args:
        optional: those that may be missing.
        others: what fields of any other name must be; None admits none.
    """

    def check(value: object) -> str:
        if not isinstance(value, dict):
            return _must("be an object", value)
        for name, one in checks.items():
            if name not in value:
                if name not in optional:
                    return f"it has no {name!r}"
            elif wrong := one(value[name]):
                return _at(name, wrong)
        for name in value.keys() - checks.keys():
            if others is None:
                return f"it has an unknown {shown(str(name))!r}"
            if wrong := others(value[name]):
                return _at(shown(str(name)), wrong)
        return ""

    return check


def having(names: Collection[str], item: Check) -> Check:
    """An object with the given names, whose values all pass one check; others may stand beside them."""

    def check(value: object) -> str:
        if not isinstance(value, dict):
            return _must("be an object", value)
        for name in names:
            if name not in value:
                return f"it has no {name!r}"
            if wrong := item(value[name]):
                return _at(name, wrong)
        return ""

    return check


def _must(what: str, value: object) -> str:
    kind = f"{type(value).__name__} of {len(value)}" if isinstance(value, dict | list) else shown(repr(value))
    return f"it must {what}, got {kind}"


def _at(name: str, wrong: str) -> str:
    """The complaint with the name of the field in front: 'epoch must be', 'best: epoch must be'."""
    return f"{name} {wrong[3:]}" if wrong.startswith("it ") else f"{name}: {wrong}"
