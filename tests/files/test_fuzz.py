"""The fuzzer notices what no reader may do, and its cases are functions of the seed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from sparring.errors import UserError
from tests.files import fuzz
from tests.files.corpus.archives import tar_cases
from tests.files.corpus.arrays import mat_cases, npz_cases
from tests.files.corpus.cases import READ, written
from tests.files.corpus.checkpoints import safetensors_cases
from tests.files.corpus.images import SOUND
from tests.files.mutate import INSIDE, changed

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux")


def wrong_value(path: Path) -> object:
    raise ValueError("no")


def endless(path: Path) -> object:
    while True:
        time.sleep(0.01)


def ends(path: Path) -> object:
    os.kill(os.getpid(), signal.SIGKILL)


def large(path: Path) -> object:
    return len(bytearray(8 * 2**30))


def two_lines(path: Path) -> object:
    raise UserError("no.\rNot at all.")


def one_line(path: Path) -> object:
    raise UserError("it is damaged. Copy it again.")


def content(path: Path) -> object:
    return path.read_bytes()


@pytest.mark.parametrize(
    ("reader", "outcome", "said"),
    [
        (wrong_value, "failed", "ValueError: no"),
        (endless, "failed", "longer than 1 s"),
        (ends, "failed", "the process ended"),
        (large, "failed", "MemoryError"),
        (two_lines, "failed", "not one line"),
        (one_line, "refused", ""),
        (content, "failed", "a silent difference"),
    ],
)
def test_what_no_reader_may_do_is_a_failure(tmp_path, monkeypatch, reader, outcome, said):
    checked = reader is content
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setitem(fuzz.FUZZED, "fake", (reader, None))
    monkeypatch.setattr(fuzz, "COVERED", {("fake", "sound"): ".txt"} if checked else {})
    given = [(("sound", READ, written("a.txt", b"numbers" * 10)), [Path("a.txt")])]
    found = list(fuzz.batch("fake", range(5, 6), 0, given, tmp_path))
    assert [(number, kind) for number, kind, _ in found] == [(5, outcome)] and said in found[0][2]
    assert not list(tmp_path.iterdir()) or reader is ends


@pytest.mark.parametrize(
    "make", [npz_cases, mat_cases, tar_cases, safetensors_cases, lambda: iter([("", "", written("a.png", SOUND))])]
)
def test_a_change_is_a_function_of_the_seed_and_reaches_inside(tmp_path, make):
    path = next(make())[2](tmp_path)
    whole = path.read_bytes()
    first, again = ([changed(path.name, whole, random.Random(seed)) for seed in range(40)] for _ in range(2))
    assert first == again and len({new for _, new in first}) > 30
    assert sum(kind == INSIDE for kind, _ in first) > 5
