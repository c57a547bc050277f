"""Label smoothing: in the loss of the update alone, the same in both engines."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparring.training import loop, run_folder


def test_smoothing_reaches_the_update_alone(tmp_path, small, monkeypatch):
    seen = []
    real = loop.soft_targets
    monkeypatch.setattr(loop, "soft_targets", lambda y, *rest, **how: seen.append(y.dtype) or real(y, *rest, **how))
    config = replace(small, epochs=1)
    weights = {}
    for smoothing in (0.0, 0.3):
        for engine in ("plain", "fast"):
            given = replace(config, label_smoothing=smoothing)
            folder = tmp_path / f"{smoothing}{engine}"
            weights[smoothing, engine] = loop.train(given, folder, tensorboard=False, engine=engine).state_dict()
    assert len(seen) == 2 * 5 and set(seen) == {torch.int64}  # five steps of two engines; none without smoothing
    for name, plain in weights[0.3, "plain"].items():
        torch.testing.assert_close(plain, weights[0.3, "fast"][name], rtol=1e-3, atol=1e-4)
    assert not torch.equal(weights[0.0, "plain"]["conv1.weight"], weights[0.3, "plain"]["conv1.weight"])
    losses = [run_folder.read_metrics(tmp_path / f"{smoothing}plain")[0]["loss"] for smoothing in (0.0, 0.3)]
    assert losses[0] != losses[1]
