"""benchmarks/check_processes.py, whose trainings are too long for a test, says what its runs say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "check_processes.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("check_processes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("exact", "two", "verdicts", "flags", "status"),
    [
        (1e-15, 1.1, "101", ["--sync-bn"], 0),
        (1e-15, 1.1, "100", ["--sync-bn"], 1),
        (1e-15, 1.5, "101", ["--sync-bn"], 1),
        (1e-15, 1.5, "101", [], 0),  # every process normalises by its own images
        (1e-15, 1.5, "100", [], 1),
        (1e-8, 1.1, "101", ["--sync-bn"], 1),
    ],
)
def test_the_verdict(script, monkeypatch, tmp_path, capsys, exact, two, verdicts, flags, status):
    norms = {"one": 1.0, "again": 1.0, "two": two, "other_seed": 2.0}
    monkeypatch.setattr(script, "in_float64", lambda folder: exact)
    monkeypatch.setattr(script, "trained", lambda run, *_: torch.full((4,), norms[run.name]))
    monkeypatch.setattr(
        script, "measured", lambda run, begin, name: {"natural": verdicts if begin is script.TWO else "101"}
    )
    assert script.main([str(tmp_path / "out.json"), "fat-digits", *flags]) == status
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["distances"] == pytest.approx({"again": 0.0, "two": two - 1, "other_seed": 1.0})
    assert (found["n"], found["flags"], found["float64"]) == (3, flags, exact) and found["accuracy"][
        "natural"
    ] == verdicts.count("1") / 3
    assert found["same_verdicts"] is (verdicts == "101") and ("DIFFER" in capsys.readouterr().out) is (
        verdicts != "101"
    )


def test_two_processes_equal_one_in_float64(script, tmp_path):
    assert 0 <= script.in_float64(tmp_path) < 1e-9


def test_a_command_that_fails_ends_it(script, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(script, "in_float64", lambda folder: 0.0)
    script.ONE = [sys.executable, "-c", "raise SystemExit('no such recipe')"]
    with pytest.raises(SystemExit, match="2"):
        script.main([str(tmp_path / "out.json"), "fat-digit"])
    assert capfd.readouterr().err.strip() == "no such recipe" and not (tmp_path / "out.json").exists()
