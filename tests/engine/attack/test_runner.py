"""The engine's attack is the plain attack: same data, same counts, whatever the buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.attack.split_batch import SplitBatch
from sparring.objectives import KTauPGD
from tests.attacks.conftest import images, network
from tests.attacks.oracle import literal_friendly_pgd

CPU = torch.device("cpu")


def search(**changes):
    given = {"eps": 0.1, "step_size": 0.02, "steps": 8, "tau": 0, "loss": "ce", "start": "uniform", "noise": 0.0}
    return KTauPGD(**(given | changes))


def both(model, attack, x, y, seed=5, **changes):
    pgd = search(**changes)
    fast = attack(pgd, x, y, torch.Generator().manual_seed(seed))
    plain = pgd(model, x, y, torch.Generator().manual_seed(seed))
    assert torch.equal(fast.backprops, plain.backprops)
    assert torch.allclose(fast.x_adv, plain.x_adv, rtol=0, atol=1e-12)
    return plain


@pytest.mark.parametrize("tau", [0, 1, 3, 8, 100])
@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize(
    ("start", "noise", "project"), [("uniform", 0.0, True), ("normal", 0.01, True), (None, 0.01, False)]
)
def test_equals_the_plain_attack(tau, loss, start, noise, project):
    model = network()
    x, y = images(model, 24)
    attack = CapturedAttack(model, 24, (1, 6, 6), 4, device=CPU, dtype=torch.float64, every=5)
    both(model, attack, x, y, tau=tau, loss=loss, start=start, noise=noise, project=project)


@pytest.mark.parametrize("tau", [0, 2, 8])
@pytest.mark.parametrize(
    ("loss", "start", "noise", "project"),
    [("ce", "uniform", 0.0, True), ("kl", "normal", 0.01, True), ("ce", None, 0.02, False)],
)
def test_equals_the_literal_oracle_in_l2(tau, loss, start, noise, project):
    model = network()
    x, y = images(model, 24)
    attack = CapturedAttack(model, 24, (1, 6, 6), 4, device=CPU, dtype=torch.float64, every=5)
    how = {"eps": 0.6, "step_size": 0.15, "steps": 6, "tau": tau, "loss": loss, "start": start, "noise": noise}
    how |= {"project": project, "norm": "l2"}
    for count in (24, 17):  # the second batch finds the buffers as the first left them, and rows in the sink
        expected, counts = literal_friendly_pgd(model, x[:count], y[:count], seed=5, **how)
        found = attack(search(**how), x[:count], y[:count], torch.Generator().manual_seed(5))
        assert torch.equal(found.backprops, counts)
        assert torch.allclose(found.x_adv, expected, rtol=0, atol=1e-10)
    assert tau == 8 or counts.float().mean() < 6
    attack(search(**how | {"norm": "linf"}), x, y, torch.Generator())
    assert len(attack.made) == 2  # a capture of its own for each norm


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_step_in_parts_is_the_same_step(loss):
    model = network()
    x, y = images(model, 24)
    parted = SplitBatch(model, CPU, {24: (15, 9), 20: (13, 7), 16: (3, 3, 10), 12: (7, 5), 8: (5, 3)})
    attack = CapturedAttack(parted, 24, (1, 6, 6), 4, device=CPU, dtype=torch.float64, every=4)
    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    both(model, attack, x, y, loss=loss, eps=0.5, step_size=0.1)
    hook.remove()
    assert sum(set(cut) <= set(seen) for cut in parted.cuts.values()) > 1


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    capacity=st.integers(1, 20),
    share=st.floats(0.01, 1),
    every=st.integers(1, 8),
    tau=st.integers(0, 6),
    size=st.floats(0.001, 0.1),
)
def test_random_stop_patterns_partial_batches_and_buckets(seed, capacity, share, every, tau, size):
    model = network(seed=seed)
    attack = CapturedAttack(model, capacity, (1, 6, 6), 4, device=CPU, dtype=torch.float64, every=every)
    count = max(1, int(share * capacity))
    for batch in range(2):  # the second finds the buffers as the first left them
        x, y = images(model, count, seed=seed + batch)
        both(model, attack, x, y, seed=seed, tau=tau, step_size=size, steps=6, noise=0.002)
        count = capacity


@pytest.mark.parametrize("tau", [0, 8])
def test_every_step_is_counted(tau):
    """What the host has launched and what the device has done: a report is told from an older one by it."""
    model = network()
    x, y = images(model, 12)
    attack = CapturedAttack(model, 12, (1, 6, 6), 4, device=CPU, dtype=torch.float64)
    for _ in range(2):
        both(model, attack, x, y, tau=tau)
        (pgd,) = attack.made.values()
        assert pgd.taken == int(pgd.active.serial)


def test_an_old_report_is_not_taken_for_the_new_one(monkeypatch):
    """A GPU reports when it gets there: what is read before is the step before."""
    model = network()
    x, y = images(model, 24)
    attack = CapturedAttack(model, 24, (1, 6, 6), 4, device=CPU, dtype=torch.float64, every=4)
    both(model, attack, x, y)
    (pgd,) = attack.made.values()
    now, late = pgd.active.read, []

    def read():
        if not late:
            serial, _ = now()
            late.append(serial)
            return serial - 1, 0  # as if no example went on
        late.clear()
        return now()

    monkeypatch.setattr(pgd.active, "read", read)
    assert both(model, attack, x, y).backprops.max() > 1


def test_no_step_is_launched_for_an_empty_set():
    model = network()
    x, _ = images(model, 12)
    with torch.no_grad():
        wrong = (model(x).argmax(dim=1) + 1) % 4  # all are fooled at the start
    attack = CapturedAttack(model, 12, (1, 6, 6), 4, device=CPU, dtype=torch.float64)
    assert both(model, attack, x, wrong, start=None).backprops.sum() == 0
    assert sum(attack.launched.values()) == 1


def test_schedules_need_no_new_buffers():
    model = network()
    x, y = images(model, 12)
    attack = CapturedAttack(model, 12, (1, 6, 6), 4, device=CPU, dtype=torch.float64)
    for tau, eps, size in [(0, 0.1, 0.02), (2, 0.05, 0.01), (8, 0.2, 0.05)]:
        both(model, attack, x, y, tau=tau, eps=eps, step_size=size)
    assert len(attack.made) == 1


def test_only_the_bucket_is_computed():
    model = network()
    x, y = images(model, 24)
    attack = CapturedAttack(model, 24, (1, 6, 6), 4, device=CPU, dtype=torch.float64, every=4)
    sizes = []
    handle = model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    fast = attack(search(start=None), x, y, torch.Generator())
    handle.remove()
    taken = fast.backprops
    seen = [24] + [int((taken >= step).sum()) for step in range(1, 8)]
    assert sizes == [-(-count // 4) * 4 for count in seen if count]
