"""Deterministic training: which switches it sets, for how long, and that a CPU computes the same with it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparring.engine.deterministic import deterministic
from sparring.engine.training_engine import tuned_sizes
from sparring.training import loop, run_folder


def switches() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    memory = torch.utils.deterministic.fill_uninitialized_memory
    return cudnn.deterministic, cudnn.benchmark, torch.get_deterministic_debug_mode(), memory


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_switches_are_set_and_put_back(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # as a caller may have it
    before = switches()
    with pytest.raises(KeyError), deterministic(True):
        assert switches() == (True, False, 1, False) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with tuned_sizes(True):
            assert not torch.backends.cudnn.benchmark  # nothing is chosen by its time
        raise KeyError
    assert switches() == before
    with deterministic(False):
        assert switches() == before


def test_a_setting_of_the_caller_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_sizes_are_tuned_otherwise():
    with tuned_sizes(True):
        assert torch.backends.cudnn.benchmark
    with tuned_sizes(False):
        assert not torch.backends.cudnn.benchmark


def test_training_records_it_and_computes_the_same(tmp_path, small):
    seen: list[tuple[Any, ...]] = []
    lines: list[str] = []

    class Watch:
        def begin(self, config: Any, *, steps: int, epoch: int, engine: str) -> None:
            lines.append(engine)

        def step(self, epoch: int, step: int, backprops: Any) -> None:
            seen.append(switches())

        def epoch(self, record: Any, *, best: bool) -> None: ...

        def end(self) -> None: ...

    before, config = switches(), replace(small, epochs=1)
    models = [
        loop.train(config, tmp_path / name, tensorboard=False, tracker=Watch(), deterministic=name == "exact")
        for name in ("exact", "plain")
    ]
    assert seen[0] == (True, False, 1, False) and seen[-1] == before == switches()
    assert [line.endswith(", deterministic") for line in lines] == [True, False]
    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True))
    starts = [run_folder.read_environment(tmp_path / name)[0] for name in ("exact", "plain")]
    assert starts[0]["deterministic"] is True and "deterministic" not in starts[1]
