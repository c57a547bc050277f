"""Typed command lines from frozen dataclasses, with one-line errors.

tyro does the parsing; here numbers may be fractions (8/255), schedules are written in one line, and what tyro would
print as a box becomes one `UserError`.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from sparring import schedules
from sparring.errors import UserError

T = TypeVar("T")
_registry = ConstructorRegistry()


@_registry.primitive_rule
def _fractions(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type is not float:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="NUMBER",
        instance_from_str=lambda words: schedules.number(words[0]),
        is_instance=lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        str_from_instance=lambda value: [schedules.spell(value)],
    )


@_registry.primitive_rule
def _schedules(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type != schedules.Schedule:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="SCHEDULE",
        instance_from_str=lambda words: schedules.parse(words[0]),
        is_instance=lambda value: isinstance(value, schedules.Schedule),
        str_from_instance=lambda value: [str(value)],
    )


def parse(kind: type[T], argv: list[str], *, prog: str, description: str, default: T | None = None) -> T:
    """An instance of `kind` from the words of a command line; `--help` prints and exits 0.

    Raises:
        UserError: in one line, for a flag or value that is not allowed.
    """
    box = io.StringIO()
    try:
        with _registry, contextlib.redirect_stderr(box):
            if default is None:
                return tyro.cli(kind, args=argv, prog=prog, description=description)
            return tyro.cli(kind, args=argv, prog=prog, description=description, default=default)
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        raise UserError(_one_line(box.getvalue(), prog)) from None


def _one_line(box: str, prog: str) -> str:
    """The message inside tyro's box, and its first suggestion, as one line."""
    lines = [line.strip("│╭╮╰╯ ").rstrip() for line in box.splitlines()]
    sections: list[list[str]] = [[]]
    for line in lines[1:-1]:
        if set(line) <= {"─"}:
            sections.append([])
        elif line:
            sections[-1].append(line)
    message = re.sub(r"\s+", " ", " ".join(sections[0])).strip()
    message = re.sub(r"^Error parsing config[\w.]*: ", "", message)  # the error of a checked dataclass names its field
    suggested = next((section for section in sections[1:] if section and section[0].startswith("Perhaps")), [])
    # A list of look-alikes is cut to the first: it is the nearest.
    flag = next((line.split()[0] for line in suggested[1:] if line.startswith("-")), "")
    hint = f" Did you mean {flag}?" if flag else ""
    return f"{message.rstrip('.')}.{hint} See `{prog} --help`."
