"""Result files: complete, readable, and refused in one line if they are something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.errors import UserError
from sparring.paper import results
from sparring.paper.result_schema import unpack
from tests.paper.tiny import TABLE, planned


def test_round_trip(tmp_path):
    common = {
        "row": "a",
        "scale": "lite",
        "seed": 0,
        "state": "measured",
        "measure": {"kind": "course"},
        "environment": {"device": "CPU", "torch": "2"},
        "config": None,
    }
    given = {**common, "found": {"points": [[0.5, 1.25], [1, 2]], "empty": {}}}
    results.write(tmp_path / "a" / "b.json", given)
    assert results.read(tmp_path / "a" / "b.json") == {"format": 1, **given}
    assert results.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"state": 1}', '{"format": 99}', '{"format": 1, "row": "fat"}'])
def test_a_file_that_is_not_a_result_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        results.read(tmp_path / "x.json")


def test_a_damaged_result_is_refused(measured, tmp_path):
    """Callers may rely on everything that `read` returns."""
    job = planned(TABLE, measured)[1]
    whole, path = results.read(job.path), tmp_path / "x.json"

    def broken(**changes):
        path.write_text(json.dumps({**whole, **changes}))
        with pytest.raises(UserError) as error:
            results.read(path)
        return str(error.value)

    assert "damaged" in broken(found={}) and "damaged" in broken(seed="x") and "damaged" in broken(trained_on="x")
    assert "damaged" in broken(environment={"device": 1}) and "damaged" in broken(measure=None)
    assert "damaged" in broken(found={"attacks": {"natural": {"accuracy": "high", "n": 5}}})
    for right in ("!", "AAAA", results.pack([True] * 4 + [False])):  # not base64, too long, another accuracy
        assert "damaged" in broken(found={"attacks": {"natural": {"accuracy": 0.6, "n": 5, "right": right}}})
    assert "format 99, this version reads 1. Measure it again" in broken(format=99)
    path.write_text(json.dumps(whole))
    assert results.read(path) == whole


def test_a_file_without_read_permission_is_a_user_error(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"cannot read .*x\.json: Permission denied"):
        results.read(tmp_path / "x.json")


def test_a_result_with_another_declaration_is_kept_as_old(measured, tmp_path):
    whole = results.read(planned(TABLE, measured)[1].path)
    del whole["format"]
    path, old = tmp_path / "x.json", tmp_path / "x.json.old"
    results.write(path, whole)
    results.write(path, {**whole, "training_seconds": 1.0})
    assert not old.exists()
    results.write(path, {**whole, "config": None})
    assert json.loads(old.read_text())["config"] == whole["config"] and results.read(path)["config"] is None
    path.write_text("{")
    results.write(path, whole)
    assert old.read_text() == "{" and results.read(path)["config"] == whole["config"]


def test_histories_are_stored_as_columns():
    records = [{"epoch": 1, "tau": None, "loss": 0.123456789}, {"epoch": 2, "tau": 1, "loss": 2.0}]
    assert results.columns(records) == {"epoch": [1, 2], "tau": [None, 1], "loss": [0.123457, 2.0]}
    assert results.columns([{"epoch": 1, "one_class": True}, {"epoch": 2}]) == {
        "epoch": [1, 2]
    }  # only some epochs have it
    assert results.columns([]) == {}


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_packing_round_trips(right):
    assert unpack(results.pack(right), len(right)) == bytes(right)
