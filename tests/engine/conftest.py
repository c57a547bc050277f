from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from sparring.engine.attack.folded import fold
from sparring.engine.triton import tuning


@pytest.fixture
def few_programs(monkeypatch):
    """Kernels in few and large programs: Triton's interpreter takes about 10 ms for each, whatever its size."""
    if torch.cuda.is_available():
        return
    pytest.importorskip("triton")
    from sparring.engine.triton import attack_step, sgd

    of = replace(tuning.of(torch.device("cpu")), batch_norm=BATCH_NORM)
    monkeypatch.setattr(tuning, "of", lambda device: of)
    monkeypatch.setattr(attack_step, "_BLOCK", 8192)
    monkeypatch.setattr(sgd, "_BLOCK", 2**16)


BATCH_NORM = tuning.BatchNormTuning(programs=2, rows=512, rows_back=512, parts=4)


@pytest.fixture
def folded(monkeypatch):
    """A small residual network, folded in fp32: with hand-written passes, and with autograd."""

    def make(model, norm=True):
        torch.manual_seed(0)
        with torch.no_grad():
            for _ in range(2 if norm else 0):
                model.train()(torch.rand(4, 3, 8, 8))
        module = importlib.import_module("sparring.engine.manual.read_chain")
        plain = fold(model, dtype=torch.float32, fused=True)
        assert plain.manual is None  # a CPU
        layers = tuple(
            importlib.import_module(f"sparring.engine.triton.{name}") for name in ("conv", "first_layer", "pooling")
        )
        monkeypatch.setattr(module, "convolutions_for", lambda device: layers)
        ours = fold(model, dtype=torch.float32, fused=True)
        return (network.to(memory_format=torch.channels_last) for network in (ours, plain))

    return make
