"""Pickles as data: what they would call is not called, and no pickle takes the process down."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from io import BytesIO
from typing import Any

import pytest

from sparring.files import opcodes
from sparring.files.opcodes import Call, ForbiddenName, Name, Refused, Set


def load(data: bytes) -> Any:
    return opcodes.load(BytesIO(data), allowed=lambda name: True)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_what_pickle_reads(protocol: int) -> None:
    value = {"a": [1, -(2**70), 2.5, None, True], b"b": ("x", (), (1, 2, 3, 4)), 3: {}, (1, "k"): [[]]}
    assert load(pickle.dumps(value, protocol)) == value
    assert load(pickle.dumps(OrderedDict(a=1, b=[2]), protocol)) == {"a": 1, "b": [2]}


def test_calls_are_returned_and_not_made() -> None:
    found = load(pickle.dumps({os.system: 1}.popitem()[0], 2))
    assert found == Name(os.system.__module__, "system")
    called = load(b"cos\nsystem\n(S'true'\ntR.")
    assert isinstance(called, Call) and called.name == Name("os", "system") and called.args == (b"true",)
    assert type(load(pickle.dumps({1, 2}, 4))) is Set


def test_a_name_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ForbiddenName, match=r"the global builtins.eval"):
        opcodes.load(BytesIO(pickle.dumps(eval)), allowed=lambda name: False)


def test_a_value_that_occurs_twice_stays_one() -> None:
    shared: list[int] = []
    first, second = load(pickle.dumps([shared, shared], 2))
    assert first is second


@pytest.mark.parametrize(
    "data",
    [
        b"}" + b")" + b"\x85" * 500_000 + b"K\x01s.",  # a key nested so deep that its hash overflows the stack
        b"N" + b"r\xff\xff\xff\x7f" + b".",  # a memo index of gigabytes
        b"X\xff\xff\xff\xffabc.",  # a text of gigabytes
        b"N" * (opcodes.STEPS + 10) + b".",
        b"\x82\x01.",
        b"(lp0\nI1\na" + b"0" * 100,
        b"cos\nsystem\n}b.",
        b"Pabc\n.",
        b"\x87.",
        b".",
        b"",
    ],
)
def test_hostile_pickles_raise(data: bytes) -> None:
    with pytest.raises((Refused, ValueError, IndexError, KeyError)):
        load(data)
