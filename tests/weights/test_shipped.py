"""The models that ship with the package are what their records say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sparring
from sparring import data, weights
from sparring.errors import UserError
from sparring.evaluation import PROTOCOLS
from sparring.weights import shipped

from .conftest import TINY, described, same, stirred, write_run


def test_fat_digits_is_what_it_says() -> None:
    assert shipped.names() == ["fat-digits"]
    loaded = weights.load("fat-digits")
    images = data.load("digits").test
    stored = {record["attack"]: record for record in loaded.facts["measured"]}
    assert loaded.facts["threat"] == {"norm": "linf", "eps": 0.3} and loaded.facts["recipe"] == "fat-digits"
    assert all(record["n"] == len(images) == 450 for record in stored.values())
    (pgd20,) = [attack for attack in PROTOCOLS["mart"].attacks if attack.name == "pgd20"]
    protocol = replace(PROTOCOLS["mart"], attacks=(pgd20,))
    result = sparring.evaluate(loaded.model, images.x, images.y, protocol, eps=0.3, doubts=False)
    assert result["natural"].accuracy == stored["natural"]["accuracy"]
    assert abs(result["pgd20"].accuracy - stored["pgd20"]["accuracy"]) <= 2 / 450  # rounding may differ elsewhere
    assert stored["autoattack"]["accuracy"] < stored["pgd20"]["accuracy"]
    assert stored["autoattack"]["eps"] == stored["pgd20"]["eps"] == 0.3


def test_it_is_small_and_names_its_classes() -> None:
    path = shipped.find(Path("fat-digits"))
    assert path is not None and path.stat().st_size < 300_000
    assert sparring.load_model("fat-digits").classes == tuple("0123456789")


def test_a_local_run_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tiny = stirred(sparring.models.build("tiny_cnn", **TINY))
    write_run(tmp_path / "fat-digits", tiny, **described("tiny_cnn", **TINY))
    same(sparring.load_model("fat-digits"), tiny, torch.rand(2, 1, 8, 8))


def test_a_path_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "fat-digits", "runs/fat-digits"):
        with pytest.raises(UserError, match="there is no checkpoint at"):
            sparring.load_model(path)
    with pytest.raises(UserError, match=r"Did you mean 'fat-digits'\?"):
        sparring.load_model("fat-digit")
