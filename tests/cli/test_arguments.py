"""Typed command lines: fractions, schedules, and errors in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from sparring.cli.arguments import parse
from sparring.errors import UserError
from sparring.objectives import FAT
from sparring.schedules import OneCycle, Schedule, constant
from sparring.schedules import parse as schedule


@dataclass(frozen=True)
class Options:
    """Some of everything."""

    count: int = 3
    """How many."""
    share: float = 0.5
    limit: int | None = None
    eps: float | None = None
    lr: Schedule = constant(0.1)  # noqa: RUF009 (a frozen value)
    mean: tuple[float, ...] = ()
    kind: Literal["one", "two"] = "one"
    loud: bool = False
    attack: FAT = field(default_factory=FAT)


@dataclass(frozen=True)
class Needs:
    name: str
    """What it is called."""


def read(*words: str) -> Options:
    return parse(Options, list(words), prog="sparring some", description="")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--count", "7"], "count", 7),
        (["--count", "-7"], "count", -7),
        (["--count=7"], "count", 7),
        (["--share", "8/255"], "share", 8 / 255),
        (["--share", "2e-4"], "share", 2e-4),
        (["--limit", "9"], "limit", 9),
        (["--attack.start", "None"], "attack", FAT(start=None)),
        (["--eps", "1/3"], "eps", 1 / 3),
        (["--lr", "0.1,0.01@60"], "lr", schedule("0.1,0.01@60")),
        (["--lr", "one-cycle:0.2"], "lr", OneCycle(0.2)),
        (["--mean", "1/2", "0.25", "1"], "mean", (0.5, 0.25, 1.0)),
        (["--loud"], "loud", True),
        (["--kind", "two"], "kind", "two"),
    ],
)
def test_values_are_parsed(words, name, value):
    assert getattr(read(*words), name) == value


def test_nested_fields_are_parsed():
    attack = read("--attack.eps", "8/255", "--attack.step-size", "2/255", "--attack.tau", "0,1@40%").attack
    assert (attack.eps, attack.step_size, attack.tau) == (constant(8 / 255), 2 / 255, schedule("0,1@40%"))


def test_given_options_replace_the_default():
    default = Options(count=8, share=8 / 255, lr=OneCycle(0.3))
    read = parse(Options, ["--count", "9"], prog="sparring some", description="", default=default)
    assert read == Options(count=9, share=8 / 255, lr=OneCycle(0.3))


@pytest.mark.parametrize("width", ["40", "80", "200"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "three"], "--count: 'three' is not a whole number. Write for example 30."),
        (["--count", "1.5"], "--count: '1.5' is not a whole number."),
        (["--count", 90 * "9" + "x"], f"--count: '{90 * '9'}x' is not a whole number."),
        (["--limit", "x"], "--limit: 'x' is not a whole number. Write for example 30."),
        (["--limit", "None"], "--limit: 'None' is not a whole number."),  # it is left out instead
        (["--share", "8/0"], "--share: '8/0' is not a number. Write for example 0.031 or 8/255."),
        (["--eps", "x"], "--eps: 'x' is not a number."),
        (["--attack.eps", "8/0"], "--attack.eps: '8/0' is not a number. Write for example 0.031 or 8/255."),
        (["--attack.tau", "x"], "--attack.tau: 'x' is not a number. Write for example 0 or 0,1@40%."),
        (["--lr", "x"], "--lr: 'x' is not a number. Write for example 0.1 or cosine:0.1."),
        (["--lr", "0.1,0.01"], "every value after the first needs its start; write for example 0.1,0.01@60."),
        (["--mean", "a"], "--mean: Could not find valid parse for arguments: ['a']. Expected --mean [NUMBER"),
        (["--kind", "three"], "Expected one of ('one', 'two')."),
        (["--cuont", "3"], "Unrecognized options: --cuont, 3. Did you mean --count?"),
        (["--cuont=3"], "Unrecognized options: --cuont, 3. Did you mean --count?"),
        (["--eeps", "3"], "Did you mean --eps?"),
        (["--attack.ep", "3"], "Did you mean --attack.eps?"),
        (["--count"], "Missing value for argument '--count'."),
        (["stray"], "Unrecognized options: stray."),
        (["--attack.eps", "8"], "attack.eps must lie in (0, 1], got 8.0. For 8/255 write 8/255."),
        (["--attack.tau", "1.5"], "attack.tau must hold whole numbers"),
        (["--attack.steps", "0"], "steps must be a whole number of at least 1"),
    ],
)
def test_errors_are_one_line_and_end_in_the_fix(monkeypatch, width, words, message):
    monkeypatch.setenv("COLUMNS", width)
    with pytest.raises(UserError) as refused:
        read(*words)
    line = str(refused.value)
    assert message in line and line.endswith("See `sparring some --help`.")
    assert not any(mark in line for mark in ("\n", "│", "──", ".. ", "  "))


def test_missing_required_option_is_named():
    with pytest.raises(UserError, match=r"^--name STR is missing: What it is called\. See `sparring some --help`\.$"):
        parse(Needs, [], prog="sparring some", description="")


def test_help_is_printed_and_exits_with_zero(capsys):
    with pytest.raises(SystemExit) as left:
        parse(Options, ["--help"], prog="sparring some", description="What it does.\n\nExamples:\n  sparring some")
    assert not left.value.code
    printed = capsys.readouterr()
    assert "  sparring some\n" in printed.out and "How many." in printed.out and printed.err == ""
    assert "--limit INT " in printed.out and "{None}" not in printed.out
