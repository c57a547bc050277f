"""The settings of a process that the command makes before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparring.cli import cpu_early

SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "500"}


class Library:
    """A fake libc that records its calls."""

    def __init__(self) -> None:
        self.set: list[tuple[int, int]] = []

    def mallopt(self, option, value):
        self.set.append((option, value))
        return 1


@pytest.fixture
def library(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    return Library()


def started(environment, library):
    cpu_early.start(environment, lambda _: library)
    return environment


def test_threads_sleep_and_memory_is_kept(library):
    assert started({}, library) == SLEEP
    assert [option for option, _ in library.set] == [-3, -1, -2]


@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "200"}])
def test_what_the_user_has_set_stays(given, library):
    assert started(dict(given), library) == given
    assert library.set
    assert started({"MALLOC_TRIM_THRESHOLD_": "1", **given}, library)
    assert len(library.set) == 3


def test_a_system_without_glibc(library):
    assert started({}, object()) == SLEEP


def test_nothing_once_torch_is_loaded():
    assert "torch" in sys.modules
    library = Library()
    assert started({}, library) == {} and not library.set


SHOWN = """
import os, sys
import sparring
assert "OMP_WAIT_POLICY" not in os.environ and "torch" not in sys.modules
from sparring.cli import main
main(["recipes"])
print(os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"])
"""


def test_the_command_sets_it_and_the_import_does_not():
    environment = {name: value for name, value in os.environ.items() if name not in SLEEP}
    done = subprocess.run([sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "PASSIVE 500", done.stderr
