"""A start-up is reported in contiguous parts."""

from __future__ import annotations

import time

import pytest

from sparring.bench import start_up


def test_parts_of_a_start_up_are_contiguous(monkeypatch):
    monkeypatch.setattr(start_up, "_process_began", lambda: 100.0)
    monkeypatch.setattr(start_up, "_IMPORTED", 101.0)
    found = start_up.start_up(103.0, 107.0, 115.0, 131.0)
    parts = {"imports_s": 1.0, "data_s": 2.0, "device_s": 4.0, "attack_s": 8.0, "update_s": 16.0}
    assert found == parts | {"first_step_s": 24.0, "process_s": 31.0}
    expected = "24.0 s, 31.0 s after the process began (imports 1.0, data 2.0, device 4.0, attack 8.0, update 16.0)"
    assert start_up.start_in_words(found) == expected


def test_process_start_precedes_the_import(monkeypatch):
    began = start_up._process_began()
    assert began <= start_up._IMPORTED + 0.1 <= time.time() + 0.1  # ticks are hundredths of a second
    monkeypatch.setattr(start_up, "Path", lambda name: (_ for _ in ()).throw(OSError("no /proc here")))
    assert start_up._process_began() == pytest.approx(start_up._IMPORTED)
