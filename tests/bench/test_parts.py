"""The ablation: a row for every part that runs, from the same weights, even if one of them fails."""

from __future__ import annotations

import json

import pytest
import torch

from sparring import cli, recipes
from sparring.bench import AblationOptions, ablation, parts, training
from sparring.data import load

CPU = torch.device("cpu")
QUICK = AblationOptions(training_s=0.01, timing_s=0.0)


@pytest.fixture
def prepared(monkeypatch):
    """The parts that engines were prepared without; the engines are identical and claim to have two parts."""
    calls, real = [], training.engine_for

    def engine_for(config, state, data, device, kind, without=(), **how):
        calls.append(tuple(without))
        made = real(config, state, data, device, "fast")
        made.parts = ("halves", "fused_bn")
        if "halves" in without:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return made

    monkeypatch.setattr(training, "engine_for", engine_for)
    monkeypatch.setattr(parts, "engine_for", engine_for)
    return calls


def rows_of(options, found):
    config = recipes.find("fat-digits").config
    return dict(ablation(config, load("digits"), CPU, options, images=200, kind="fast", keep=found.update))


def test_every_part_is_measured_or_has_a_reason(prepared):
    found = {}
    rows = rows_of(QUICK, found)
    assert prepared == [(), ("halves",), ("fused_bn",), ()]  # the complete engine first and last
    assert rows["without manual"] == "-" and found["parts"]["manual"] == {"not_in_use": True}
    assert rows["without halves"] == "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"
    measured, complete = found["parts"]["fused_bn"], found["complete"]
    assert measured["madry_ratio"] == pytest.approx(measured["madry"]["median"] / complete["madry"]["median"])
    assert f"= {measured['fat_ratio']:.3f}x" in rows["without fused_bn"]
    assert measured["fat"]["backprops"] == pytest.approx(complete["fat"]["backprops"])  # the same weights
    assert complete["madry"]["backprops"] == 10 > complete["fat"]["backprops"]
    assert found["again"]["madry_ratio"] > 0
    json.dumps(found)


def test_parts_are_skipped_over_the_time_limit(prepared):
    found = {}
    rows = rows_of(AblationOptions(training_s=0.01, timing_s=0.0, limit_s=1e-9, parts_of=("fused_bn",)), found)
    assert rows["without fused_bn"] == "skipped: over the limit of 1e-09 s" and list(found["parts"]) == ["fused_bn"]


def test_command_writes_table_and_json(tmp_path, capsys):
    words = ["--only", "parts", "--training-s", "0.01", "--timing-s", "0", "--images", "128", "--engine", "fast"]
    out = tmp_path / "parts.json"
    assert cli.main(["bench", "fat-digits", "--device", "cpu", "--json", str(out), *words]) == 0
    assert "without manual" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["networks"]["tiny_cnn"]["complete"]["madry"]["n"] == 3 and found["command"] and found["torch"]
