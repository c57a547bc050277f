"""Every damaged or hostile file is read, or refused in one line, within a bound of memory; none ends the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux")
ROOT = Path(__file__).parents[2]
LEAST = 600  # cases
ROOM = 2**30  # bytes


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, "-m", "tests.files.corpus", str(folder)]
    places = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_case_is_read_or_refused_as_it_must_be(lines: list[dict[str, Any]]) -> None:
    assert len(lines) >= LEAST
    wrong = [line for line in lines if line["found"] not in ("read", "refused")]
    wrong += [line for line in lines if line["must"] != "either" and line["found"] != line["must"]]
    assert not wrong


def test_refusals_are_one_short_line_that_ends_in_the_fix(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["found"] == "refused":
            assert line["said"].isprintable() and line["said"].endswith(".") and len(line["said"]) < 900, line
            assert "MemoryError" not in line["said"] and "can't allocate" not in line["said"], line


def test_no_case_takes_more_memory_than_the_bound(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["bytes"] < ROOM, line
