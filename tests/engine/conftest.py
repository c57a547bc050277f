from __future__ import annotations

import importlib

import pytest
import torch

from sparring.engine.attack.folded import fold


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
