"""Typed command lines from frozen dataclasses, with one-line errors.

tyro does the parsing; here numbers may be fractions (8/255), schedules are written in one line, and what tyro would
print as a box becomes one `UserError`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from sparring import models, schedules
from sparring.attacks import ball
from sparring.errors import UserError
from sparring.models.own import is_import_path
from sparring.objectives import OBJECTIVES, Objective

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
def _parts_of_eps(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A number or words that stand for one (eps, eps/4), which the dataclass itself checks."""
    words = {str: "NUMBER|eps/N", Literal["eps"]: "NUMBER|eps"}
    found = next((metavar for kind, metavar in words.items() if info.type == float | kind), None)
    if found is None:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=found,
        instance_from_str=lambda words: words[0] if words[0].startswith("eps") else schedules.number(words[0]),
        is_instance=lambda value: isinstance(value, int | float | str) and not isinstance(value, bool),
        str_from_instance=lambda value: [value if isinstance(value, str) else schedules.spell(value)],
    )


@_registry.primitive_rule
def _whole_numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _whole(words[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{text!r} is not a whole number. Write for example 30.") from None


@_registry.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """What may be None, without that word: such an option is left out. But an attack may be told to start at None."""
    kinds = get_args(info.type)
    if len(kinds) != 2 or kinds[1] is not type(None) or info.type == ball.Start:
        return None
    found = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if not isinstance(found, PrimitiveConstructorSpec):
        return None
    return replace(
        found,
        is_instance=lambda value: value is None or found.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else found.str_from_instance(value),
    )


@_registry.primitive_rule
def _schedules(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type not in (schedules.Schedule, schedules.Scheduled):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="SCHEDULE",
        instance_from_str=lambda words: schedules.parse(words[0]),
        is_instance=lambda value: isinstance(value, schedules.Schedule),
        str_from_instance=lambda value: [str(value)],
    )


@_registry.primitive_rule
def _objectives(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """An objective by its name alone; its parameters are flags of their own (--attack.eps)."""
    if info.type is not Objective:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(OBJECTIVES) + "}",
        instance_from_str=lambda words: OBJECTIVES[words[0]](),
        is_instance=lambda value: type(value) in OBJECTIVES.values(),
        str_from_instance=lambda value: [value.name],
        choices=tuple(OBJECTIVES),
    )


def parse(kind: type[T], argv: list[str], *, prog: str, description: str, default: T | None = None) -> T:
    """An instance of `kind` from the words of a command line; `--help` prints and exits 0.

    Raises:
        UserError: in one line, for a flag or value that is not allowed.
    """
    box = io.StringIO()
    helps = {"-h", "--help"} & set(argv)
    try:
        with _registry, contextlib.redirect_stderr(box), contextlib.nullcontext() if helps else _unwrapped():
            if default is None:
                return tyro.cli(kind, args=argv, prog=prog, description=description)
            return tyro.cli(kind, args=argv, prog=prog, description=description, default=default)
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        apart = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
        if apart != argv and "Unrecognized" in box.getvalue():  # of --flag=value tyro names no look-alike
            parse(kind, apart, prog=prog, description=description, default=default)
        raise UserError(_one_line(box.getvalue(), prog)) from None


def named_again(model: str) -> list[str]:
    """The words that name a run's network once more, where it was named by import path."""
    return ["--model", model] if is_import_path(model) else []


def name_model(text: str | None) -> None:
    """Take a network's name from the command line: a module in the current folder counts as importable."""
    if text is None:
        return
    here = str(Path.cwd())
    if is_import_path(text) and not {"", here} & set(sys.path):  # as `python -m` does; a console script leaves it out
        sys.path.insert(0, here)
    models.name_model(text)


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """A terminal so wide that tyro wraps nothing: it would also cut words, which cannot be joined again."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _one_line(box: str, prog: str) -> str:
    """The message inside tyro's box, and its first suggestion, as one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    sections: list[list[str]] = [[]]
    for line in lines[1:]:  # the first is the title
        if line and set(line) <= {"─", "-"}:  # - where the terminal is not UTF-8
            sections.append([])
        elif line:
            sections[-1].append(line)
    sections = [section for section in sections if section]
    # The error of a checked dataclass names its field itself.
    message = re.sub(r"^Error parsing attack: (?=\w+ must )", "attack.", " ".join(sections[0]))
    message = re.sub(r"^Error parsing (config[\w.]*: |attack: |\w+: (?=--))?", "", message)
    # Of a value that may be absent tyro tells why it is not None, and then what is wrong with it.
    message = re.sub(r"no type matching .* - <class '\w+'>: ", "", message)
    if flag := re.match(r"--(?:attack\.)?(\w+): ", message):
        message = schedules.with_examples_of(flag[1], message)
    if message.startswith("Missing from"):
        message = f"{sections[0][1]} is missing: {sections[0][2].removesuffix(' (required)')}"
    if "Could not find valid parse" in message:
        expected = next((section[1] for section in sections[1:] if section[0].startswith("Argument helptext")), "")
        message = f"{message}. Expected {expected}"
    suggested = next((section for section in sections[1:] if section[0].startswith("Perhaps")), [])
    # A list of look-alikes is cut to the first: it is the nearest.
    near = next((line.split()[0].rstrip(",") for line in suggested[1:] if line.startswith("-")), "")
    hint = f" Did you mean {near}?" if near else ""
    return f"{message.rstrip('.')}.{hint} See `{prog} --help`."
