"""Checks of values read from files: each accepts what it declares and complains in words about the rest."""

import math

import pytest

from sparring.files.schema import (
    anything,
    both,
    either,
    fields,
    flag,
    having,
    items,
    nothing_or,
    number,
    one_of,
    table,
    text,
    whole,
)

RECORD = fields(epoch=whole(1), loss=number(), note=text(5), optional=("note",))


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (whole(), 0),
        (whole(1, 3), 3),
        (number(), 1),
        (number(0, 1), 0.5),
        (number(finite=False), math.nan),
        (number(finite=False), math.inf),
        (text(3), "abc"),
        (flag, False),
        (anything, object()),
        (one_of("a", 1), 1),
        (nothing_or(whole()), None),
        (nothing_or(whole()), 4),
        (either(whole(), text()), "x"),
        (items(whole(), most=2), [1, 2]),
        (table(whole()), {"a": 1}),
        (RECORD, {"epoch": 1, "loss": 0.5}),
        (RECORD, {"epoch": 1, "loss": 0.5, "note": "five5"}),
        (fields(others=whole()), {"a": 1}),
    ],
)
def test_what_is_declared_passes(check, value):
    assert check(value) == ""


@pytest.mark.parametrize(
    ("check", "value", "wrong"),
    [
        (whole(), True, "it must be a whole number from 0 to 9007199254740992, got True"),
        (whole(), 1.0, "it must be a whole number from 0 to 9007199254740992, got 1.0"),
        (whole(1, 3), 4, "it must be a whole number from 1 to 3, got 4"),
        (number(), math.nan, "it must be a finite number, got nan"),
        (number(), 10**400, "it must be a finite number, got 1"),
        (number(0, 1), 2, "it must be a finite number from 0 to 1, got 2"),
        (number(0, 1, finite=False), 2, "it must be a number from 0 to 1, got 2"),
        (number(), False, "it must be a finite number, got False"),
        (text(3), "abcd", "it must be a text of up to 3, got 'abcd'"),
        (text(), "line\nline" * 2000, "it must be a text of up to 10,000"),
        (flag, 1, "it must be true or false, got 1"),
        (one_of("a", 1), True, "it must be one of 'a', 1, got True"),
        (nothing_or(flag), 0, "it must be true or false, got 0"),
        (either(whole(), flag), "x", "it must be true or false, got 'x'"),
        (items(whole()), {}, "it must be a list of 0 to 1,000,000 entries, got dict of 0"),
        (items(whole(), most=1), [1, 2], "it must be a list of 0 to 1 entries, got list of 2"),
        (items(whole()), [1, "x"], "entry 2: it must be a whole number"),
        (table(whole()), {"a\n": "x"}, r"'a\n': it must be a whole number"),
        (RECORD, [], "it must be an object, got list of 0"),
        (RECORD, {"epoch": 1}, "it has no 'loss'"),
        (RECORD, {"epoch": 0, "loss": 1}, "epoch must be a whole number from 1"),
        (RECORD, {"epoch": 1, "loss": 1, "lots": 2}, "it has an unknown 'lots'"),
        (fields(best=RECORD), {"best": {"epoch": 1, "loss": None}}, "best: loss must be a finite number, got None"),
        (fields(others=whole()), {"a": "b"}, "a must be a whole number"),
        (having("ab", whole()), {"a": 1}, "it has no 'b'"),
        (having("ab", whole()), {"a": 1, "b": "x", "c": None}, "b must be a whole number"),
        (having("a", whole()), [], "it must be an object, got list of 0"),
        (both(whole(), lambda value: "it is odd" if value % 2 else ""), 3, "it is odd"),
        (both(whole(), lambda value: "it is odd" if value % 2 else ""), "x", "it must be a whole number"),
    ],
)
def test_the_rest_is_named(check, value, wrong):
    found = check(value)
    assert found.startswith(wrong) and "\n" not in found and len(found) < 250
