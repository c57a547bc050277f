"""Units on this machine: a failure does not end the others, a stop ends all."""

from __future__ import annotations

import pytest
import torch

from sparring.errors import Cancelled, UserError
from sparring.launch import Unit
from sparring.launch.local import Stopped, in_turn, side_by_side
from sparring.training.loop import Diverged

UNITS = [Unit(name, (name,)) for name in "abc"]
CPU = torch.device("cpu")


def test_in_turn_goes_on_after_a_failure():
    called, said = [], []

    def call(words):
        called.append(words)
        if words == ["a"]:
            raise Diverged(1, 2, 0.1, "0.1")
        if words == ["b"]:
            raise UserError("no such folder.")

    failures = in_turn(UNITS, call, said.append)
    assert called == [["a"], ["b"], ["c"]] and list(failures) == ["a", "b"]
    assert "not finite" in failures["a"] and failures["b"] == "no such folder."
    assert said[0] == "1 of 3: a" and said[-1] == "3 of 3: c"


def test_in_turn_ends_at_a_stop():
    called = []

    def call(words):
        called.append(words)
        raise Cancelled("stopped in epoch 1; saved.")

    with pytest.raises(Stopped, match="stopped in epoch 1; saved"):
        in_turn(UNITS, call, lambda line: None)
    assert called == [["a"]]


def test_side_by_side_goes_on_after_a_failure():
    units = [Unit("wrong", ("tarin",)), Unit("a", ("--version",)), Unit("b", ("--version",))]
    said = []
    failures = side_by_side(units, at_once=2, device=CPU, stop=lambda: False, tell=said.append)
    assert list(failures) == ["wrong"] and failures["wrong"].startswith("unknown command 'tarin'")
    assert sorted(line.split()[0] for line in said) == ["a:", "b:"]


def test_side_by_side_ends_at_a_stop():
    units = [Unit(str(number), ("--version",)) for number in range(3)]
    said = []
    with pytest.raises(Stopped, match="stopped all processes"):
        side_by_side(units, at_once=1, device=CPU, stop=lambda: len(said) > 0, tell=said.append)
    assert len(said) == 1
