"""Objectives that adapt to the run: their state is in its metrics, so they resume exactly too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparring.attacks import pgd
from sparring.data import batches, hold_out, load
from sparring.errors import UserError
from sparring.objectives import Progress
from sparring.objectives.cat import mastered_steps
from sparring.schedules import constant, parse
from sparring.seeds import Draw, derive_seed, generator
from sparring.training import loop, run_folder
from sparring.training.config import with_objective
from sparring.training.loop import Interrupted
from sparring.training.validation import validate
from sparring.weights import load_model
from tests.training.test_loop import in_two_parts, same_run


@pytest.fixture(scope="module")
def lessons(tmp_path_factory, small):
    """Uninterrupted curriculum training whose step count has grown by the end."""
    config = with_objective(small, "cat", eps=0.1, step_size=0.02, steps=9, patience=1)
    config = replace(config, epochs=6, lr=parse("0.05,0.001@3"))
    folder = tmp_path_factory.mktemp("lessons") / "run"
    loop.train(config, folder, tensorboard=False)
    return config, folder


def test_cat_step_count_follows_from_the_metrics(lessons):
    """k_i is uniform in 0..k, so the epoch's mean is about k / 2 (1,317 images: a standard error of at most 0.03)."""
    config, folder = lessons
    records = run_folder.read_metrics(folder)
    counts = [mastered_steps([r["own"] for r in records[:n]], 1, config.objective.steps) for n in range(len(records))]
    assert counts[0] == 1
    assert counts[-1] > 1
    assert [record["steps"] for record in records] == counts
    for record, k in zip(records, counts, strict=True):
        assert record["backprops"] == pytest.approx(k / 2, abs=0.15)


def test_cat_measures_its_own_attack(lessons):
    """The k-accuracy of the last epoch: held-out images under PGD-k, at the attack's own radius and step size."""
    config, folder = lessons
    last = run_folder.read_metrics(folder)[-1]
    held = hold_out(load("digits").train, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))
    x, y = next(iter(batches(held[1], 500)))
    model = load_model(folder)
    numbers = config.objective.pgd(Progress(config.epochs, config.epochs)) | {"steps": last["steps"]}
    assert last["steps"] < config.objective.steps  # PGD-k, not PGD-K

    def accuracy(**numbers):
        draws = generator(torch.device("cpu"), config.seed, Draw.VALIDATION, 0)
        return (model(pgd(model, x, y, generator=draws, **numbers)).argmax(dim=1) == y).double().mean().item()

    assert last["own"] == accuracy(**numbers) != accuracy(**{**numbers, "steps": config.objective.steps})
    assert last["own"] > last["pgd10"]  # fewer steps in a smaller ball


@pytest.mark.parametrize("moment", [7, 15, 27])
def test_cat_resumes_exactly_with_its_step_count(tmp_path, lessons, moment):
    config, whole = lessons
    same_run(whole, in_two_parts(config, tmp_path / "parts", moment))


@pytest.fixture(scope="module")
def paces(tmp_path_factory, small):
    """Uninterrupted FAT whose tau follows the steps of the previous epoch."""
    config = with_objective(small, "fat-paced", eps=0.1, step_size=0.03, steps=4, share=0.75)
    config = replace(config, epochs=4, batch_size=64, augment="none", lr=constant(0.05))
    folder = tmp_path_factory.mktemp("paces") / "run"
    loop.train(config, folder, tensorboard=False)
    return config, folder


def test_metrics_hold_the_tau_that_was_used(tmp_path, paces):
    """An epoch run with the recorded tau as its schedule is the same epoch."""
    config, folder = paces
    records = run_folder.read_metrics(folder)
    used = [record["tau"] for record in records]
    before = [0.0, *(record["backprops"] for record in records[:-1])]
    assert used == [math.floor(0.75 * backprops) for backprops in before]
    assert len(set(used)) > 1 and used[0] == 0
    written = ",".join([str(used[0]), *(f"{tau}@{epoch}" for epoch, tau in enumerate(used[1:], 2))])
    fixed = with_objective(config, "fat", tau=written)
    loop.train(fixed, tmp_path / "fixed", tensorboard=False)
    same_run(folder, tmp_path / "fixed")


@pytest.mark.parametrize("moment", [19, 60])
def test_tau_by_rule_resumes_exactly(tmp_path, paces, moment):
    config, whole = paces
    same_run(whole, in_two_parts(config, tmp_path / "parts", moment))


def test_run_with_damaged_metrics_is_refused(tmp_path, small):
    config = with_objective(replace(small, epochs=4), "cat", patience=1)
    with pytest.raises(Interrupted):
        loop.train(config, tmp_path / "run", stop=lambda: len(run_folder.read_metrics(tmp_path / "run")) == 3)
    records = tmp_path / "run" / run_folder.METRICS
    records.write_text(records.read_text().splitlines(keepends=True)[0])
    with pytest.raises(UserError, match="of 3 epochs each should have a record, there are 1"):
        loop.train(config, tmp_path / "run", resume=True)
    assert (
        len(run_folder.read_metrics(tmp_path / "run")) == len(run_folder.read_environment(tmp_path / "run")) == 1
    )  # as it was


def test_validation_and_both_engines_follow_the_norm(small, tmp_path):
    """In L2 the captured attack (uncaptured on a CPU) and the plain one train the same model."""
    config = with_objective(replace(small, epochs=1), eps=0.8, norm="l2", tau=1)
    weights = {}
    for kind in ("plain", "fast"):
        model = loop.train(config, tmp_path / kind, engine=kind, tensorboard=False)
        weights[kind] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.allclose(weights["plain"], weights["fast"], atol=1e-4)
    data = load(config.data)
    _, held = hold_out(data.train, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))
    (record,) = run_folder.open_run(tmp_path / "plain").metrics()
    expected = validate(load_model(tmp_path / "plain"), held, eps=0.8, norm="l2", seed=config.seed)
    assert (record["natural"], record["pgd10"]) == expected
    assert expected != validate(load_model(tmp_path / "plain"), held, eps=0.8, seed=config.seed)


def test_an_attack_on_logits_that_are_not_finite_is_a_divergence(small, tmp_path):
    config = replace(small, epochs=1, lr=1e30)
    with pytest.raises(loop.Diverged, match="not finite by epoch 1"):
        loop.train(config, tmp_path / "run", tensorboard=False)
