"""benchmarks/check_optimisers.py, which needs a GPU to say anything, runs and sees a difference where there is one."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "check_optimisers.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("check_optimisers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where a dataclass looks up its own module
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TIMED", 1)
    return module


def test_a_case_that_fails_does_not_hide_the_others(script, monkeypatch, tmp_path, capsys):
    cases = {"good": replace(script.CASES["clip"], smoothing=0.1), "bad": replace(script.CASES["sgd"], lr=1e30)}
    monkeypatch.setattr(script, "CASES", cases)
    assert script.main([str(tmp_path / "out.json")]) == 1
    printed = capsys.readouterr().out
    assert printed.count("bad: FAILED") == 4 and printed.count("engine: fast") == 4 and "4 of 8 cases" in printed


def test_fast_update_is_the_plain_one(script, monkeypatch):
    row = script.compare(script.CASES["adamw, no decay of vectors"], "layer-norm", False)
    assert row["moved"] < 1e-4 and row["loss"] < 1e-4
    real = script.engine_of
    monkeypatch.setattr(
        script, "engine_of", lambda case, *rest: real(replace(case, clip=case.clip / 2 * (rest[1] == "fast")), *rest)
    )
    assert script.compare(script.CASES["clip"], "layer-norm", False)["moved"] > 0.1
