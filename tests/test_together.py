from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparring import runs, train
from sparring.errors import RunFailed, UserError
from sparring.schedules import parse
from sparring.together import train_together


def test_company_changes_nothing(tmp_path, small):
    configs = [replace(small, seed=seed, epochs=2) for seed in range(3)]
    together = train_together(
        [(config, tmp_path / f"run-{config.seed}") for config in configs], at_once=2, tensorboard=False
    )
    for config, model in zip(configs, together, strict=True):
        alone = train.train(config, tmp_path / f"alone-{config.seed}", tensorboard=False)
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))
        metrics = [runs.read_metrics(tmp_path / f"{kind}-{config.seed}") for kind in ("alone", "run")]
        for one, other in zip(*metrics, strict=True):
            assert (one["loss"], one["natural"], one["backprops"]) == (
                other["loss"],
                other["natural"],
                other["backprops"],
            )


def test_a_run_that_fails_stops_the_others_which_keep_their_place(tmp_path, small):
    bad = replace(small, lr=parse("1e30"), epochs=1)
    long = replace(small, epochs=500)
    with pytest.raises(RunFailed, match="not finite"):
        train_together([(long, tmp_path / "long"), (bad, tmp_path / "bad")], at_once=2, tensorboard=False)
    assert runs.open_run(tmp_path / "long").last() is not None


def test_nobody_at_once_is_refused(tmp_path, small):
    with pytest.raises(UserError, match="at_once"):
        train_together([(small, tmp_path / "run")], at_once=0)
