"""The one loop: what its hook sees, who is computed, and how often the host waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.attacks import friendly_pgd, margin_pgd, pgd, pgd_until
from sparring.attacks.friendly import TauLeft
from sparring.attacks.losses import InnerLoss
from sparring.attacks.pgd import pgd_loop
from sparring.evaluation.starts import pgd_from

SETTINGS = {"eps": 0.1, "step_size": 0.02, "steps": 6}


class HostSyncs(TorchDispatchMode):
    """Counts operations whose result the host must wait for on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masked = func._schema.name in ("aten::index", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked or func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def syncs(attack, steps):
    with HostSyncs() as counted:
        attack(steps)
    return counted.count


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_plain_pgd_waits_for_no_step(loss, batch):
    model, x, y = batch
    few, many = (
        syncs(lambda steps: pgd(model, x, y, eps=0.1, step_size=0.02, steps=steps, loss=loss), steps)
        for steps in (1, 9)
    )
    assert few == many > 0  # those of the checked arguments
    given = {"start": x, "eps": 0.1, "step_size": 0.02, "loss": loss}
    assert syncs(lambda steps: pgd_from(model, x, y, steps=steps, **given), 9) == 0


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_stop_rule_waits_once_a_step(noise, batch):
    model, x, y = batch
    given = {"eps": 0.1, "step_size": 0.02, "tau": 9, "noise": noise}
    few, many = (syncs(lambda steps: friendly_pgd(model, x, y, steps=steps, **given), steps) for steps in (1, 9))
    assert many - few == 8


@pytest.mark.parametrize("tau", [0, 2])
def test_the_hook_sees_every_iterate_and_the_last(tau, batch):
    """Iterate k of the examples still active is where PGD-K-tau with k steps leaves them."""
    model, x, y = batch
    seen = []
    inner = InnerLoss("ce", model, x)
    found = pgd_loop(model, x, y, start=x, loss=inner, stop=TauLeft(tau, y), hook=seen.append, **SETTINGS)
    assert [at.step for at in seen] == list(range(7))
    for at in seen:
        assert (found.backprops[at.rows] >= at.step).all()
        assert ((found.backprops >= at.step) & ~torch.isin(torch.arange(len(x)), at.rows)).sum() == 0
        assert torch.equal(at.y, y[at.rows]) and torch.equal(at.x, x[at.rows])
        if at.step:
            there = friendly_pgd(model, x, y, tau=tau, **(SETTINGS | {"steps": at.step})).x_adv[at.rows]
            assert torch.equal(at.x_adv, there)
        assert torch.allclose(at.logits, model(at.x_adv), rtol=0, atol=1e-12)
    assert torch.equal(found.x_adv[seen[-1].rows], seen[-1].x_adv)
    assert torch.equal(found.x_adv, friendly_pgd(model, x, y, tau=tau, **SETTINGS).x_adv)


def test_a_hook_costs_one_forward_pass_and_no_gradient(batch):
    model, x, y = batch
    forwards, backwards = [], []
    model.register_forward_pre_hook(lambda _, inputs: forwards.append(torch.is_grad_enabled()))
    model.register_full_backward_hook(lambda *_: backwards.append(1))
    inner = InnerLoss("ce", model, x)
    pgd_loop(model, x, y, start=x, loss=inner, hook=lambda at: at.loss, **SETTINGS)
    assert forwards == [True] * 6 + [False] and len(backwards) == 6


def test_the_direction_decides_the_step(batch):
    model, x, y = batch
    given = {"start": x, "loss": InnerLoss("ce", model, x), **SETTINGS}
    down = pgd_loop(model, x, y, direction=lambda gradient, rows: -gradient.sign(), **given).x_adv
    assert (inner_ce(model, down, y) < inner_ce(model, x, y)).all()
    still = pgd_loop(model, x, y, direction=lambda gradient, rows: 0 * gradient, **given)
    assert torch.equal(still.x_adv, x) and (still.backprops == 6).all()


def inner_ce(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none").detach()


def test_a_rule_that_reads_only_logits_costs_no_gradient(batch):
    """Where every example stops at once, no backward pass runs."""
    model, x, y = batch
    backwards = []
    model.register_full_backward_hook(lambda *_: backwards.append(1))
    assert margin_pgd(model, x, y, margin=-1.0, **SETTINGS).backprops.sum() == 0
    assert not backwards


def test_an_example_out_of_steps_is_not_predicted(batch):
    model, x, y = batch
    sizes = []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    steps = torch.arange(len(x)) % 4
    assert torch.equal(pgd_until(model, x, y, eps=0.1, step_size=0.02, steps=steps).backprops, steps)
    assert sizes == [18, 12, 6]
