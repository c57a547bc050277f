"""The files: whole, readable, and refused in one line where they are not ours."""

from __future__ import annotations

import pytest

from sparring.errors import UserError
from sparring.reproduce import results


def test_round_trip(tmp_path):
    who = {
        "row": "a",
        "scale": "lite",
        "seed": 0,
        "state": "measured",
        "measure": {},
        "environment": {},
        "config": None,
    }
    given = {**who, "found": {"points": [[0.5, 1.25], [1, 2]], "empty": {}}}
    results.write(tmp_path / "a" / "b.json", given)
    assert results.read(tmp_path / "a" / "b.json") == {"format": 1, **given}
    assert results.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"state": 1}', '{"format": 99}', '{"format": 1, "row": "fat"}'])
def test_a_file_of_another_kind(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        results.read(tmp_path / "x.json")


def test_columns_keep_what_figures_show():
    records = [{"epoch": 1, "tau": None, "loss": 0.123456789}, {"epoch": 2, "tau": 1, "loss": 2.0}]
    assert results.columns(records) == {"epoch": [1, 2], "tau": [None, 1], "loss": [0.123457, 2.0]}
    assert results.columns([]) == {}
