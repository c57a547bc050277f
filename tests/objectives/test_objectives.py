"""Objectives: friendly at tau = K is the original, bitwise; gradients equal the equations written out."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from sparring.attacks import fosc_pgd, friendly_pgd, pgd
from sparring.attacks.losses import soft_targets
from sparring.errors import UserError
from sparring.objectives import (
    ATES,
    CAT,
    DAT,
    FAT,
    MART,
    OBJECTIVES,
    TRADES,
    FATForMART,
    FATForTRADES,
    KTauPGD,
    Madry,
    Progress,
    Standard,
)
from sparring.schedules import parse
from tests.attacks.conftest import images, network

ATTACK = {"eps": 0.1, "step_size": 0.03, "steps": 5, "start": "uniform"}
FRIENDLY = [(FAT, Madry), (FATForTRADES, TRADES), (FATForMART, MART)]
BEGIN = Progress(1, 10)


@pytest.fixture
def batch():
    model = network().train()
    return model, *images(model, 16)


def seeded():
    return torch.Generator().manual_seed(9)


def make(kind, **parameters):
    """An objective with the numbers of this file, as far as it has them."""
    own = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in ATTACK.items() if name in own} | parameters)


def find(objective, model, x, y, progress=BEGIN):
    return objective.search(progress)(model, x, y, seeded())


def one_update(objective, model, x, y):
    """The gradients and batch-norm statistics after one search and one backward pass."""
    model = copy.deepcopy(model).train()
    found = find(objective, model, x, y)
    loss = objective.loss(model, x, found.x_adv, y)
    loss.backward()
    return found, loss, [p.grad for p in model.parameters()], list(model.buffers())


@pytest.mark.parametrize(("friendly", "original"), FRIENDLY)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_friendly_at_tau_k_is_the_original_bitwise(batch, friendly, original, noise):
    one = one_update(make(friendly, tau=5, noise=noise), *batch)
    other = one_update(make(original, noise=noise), *batch)
    assert torch.equal(one[0].x_adv, other[0].x_adv)
    assert (one[0].backprops == 5).all()
    assert torch.equal(one[1], other[1])
    for kind in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(one[kind], other[kind], strict=True))


@pytest.mark.parametrize(("friendly", "original"), FRIENDLY)
def test_friendly_below_k_takes_fewer_steps(batch, friendly, original):
    taken = [find(make(kind), *batch).backprops.sum() for kind in (friendly, original)]
    assert taken[0] < taken[1]


def test_inner_losses(batch):
    """TRADES ascends the KL, all others the cross-entropy."""
    model, x, y = batch
    for kind, loss in [(Madry, "ce"), (TRADES, "kl"), (MART, "ce")]:
        expected = pgd(model, x, y, eps=0.1, step_size=0.03, steps=5, loss=loss, generator=seeded())
        assert torch.equal(find(make(kind), *batch).x_adv, expected)
    expected = friendly_pgd(model, x, y, tau=1, loss="kl", generator=seeded(), **ATTACK)
    assert torch.equal(find(make(FATForTRADES, tau=1), *batch).x_adv, expected.x_adv)


def longhand(name, model, x, x_adv, y):
    """The equations of the paper with torch's plainest operations, summed example by example."""
    total, n = 0.0, len(x)
    if name in ("madry", "fat", "cat", "dat", "ates") or name.startswith(("fat-by", "fat-pa")):
        z = torch.softmax(model(x_adv), dim=1)
        return sum(-torch.log(z[i, y[i]]) for i in range(n)) / n
    if name == "standard":
        z = torch.softmax(model(x), dim=1)
        return sum(-torch.log(z[i, y[i]]) for i in range(n)) / n
    if name.endswith("mart"):
        adversarial, natural = torch.softmax(model(x_adv), dim=1), torch.softmax(model(x), dim=1)
    else:
        natural, adversarial = torch.softmax(model(x), dim=1), torch.softmax(model(x_adv), dim=1)
    for i in range(n):
        p, q, c = natural[i], adversarial[i], int(y[i])
        if name.endswith("trades"):
            divergence = sum(p[k] * torch.log(p[k] / q[k]) for k in range(len(p)))
            total = total - torch.log(p[c]) + 6.0 * divergence
        else:
            divergence = sum(p[k] * (torch.log(p[k]) - torch.log(q[k] + 1e-12)) for k in range(len(p)))
            wrong = max(q[k] for k in range(len(q)) if k != c)
            bce = -torch.log(q[c]) - torch.log(1.0001 - wrong + 1e-12)
            total = total + bce + 6.0 * divergence * (1.0000001 - p[c])
    return total / n


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_equal_autograd_on_the_equation(batch, name):
    model, x, y = batch
    found, loss, gradients, statistics = one_update(make(OBJECTIVES[name]), model, x, y)
    reference = copy.deepcopy(model).train()
    expected = longhand(name, reference, x, found.x_adv, y)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    for ours, theirs in zip(gradients, reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs.grad, rtol=1e-8, atol=1e-12)
    # The order of the two forwards shows in batch-norm's running statistics.
    for ours, theirs in zip(statistics, reference.buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_step_in_a_custom_loop_equals_our_step(batch, name):
    """Same data, same loss, same gradients, bit for bit; and the modes of all modules are as they were."""
    model, x, y = batch
    objective = make(OBJECTIVES[name])
    found, loss, gradients, _ = one_update(objective, model, x, y)
    modes = [module.training for module in model.modules()]
    step = objective(model, x, y, progress=0.0, generator=seeded())
    step.loss.backward()
    assert torch.equal(step.x_adv, found.x_adv) and torch.equal(step.backprops, found.backprops)
    assert torch.equal(step.loss, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert modes == [module.training for module in model.modules()]


def test_schedules_follow_the_progress_of_a_custom_loop():
    fat = FAT(tau="0,1@40%,2@75%", eps="ramp:0..8/255@50%")
    taus = [fat.search(Progress.at_fraction(epoch / 20)).tau for epoch in range(1, 20)]
    assert taus == [0] * 7 + [1] * 7 + [2] * 5  # at 40 % of 20 epochs, 8 are done
    assert fat.search(Progress.at_fraction(0.25)).eps == pytest.approx(4 / 255)
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"progress must lie in \[0, 1\]"):
            Progress.at_fraction(wrong)


def test_dat_stops_by_fosc_at_the_criterion_of_the_epoch(batch):
    model, x, y = batch
    counts = []
    for criterion in (0.5, 0.02, 0.0):
        found = find(make(DAT, fosc=criterion), *batch)
        expected = fosc_pgd(model, x, y, criterion=criterion, generator=seeded(), **ATTACK)
        assert torch.equal(found.x_adv, expected.x_adv)
        counts.append(int(found.backprops.sum()))
    assert counts == sorted(set(counts))  # a smaller criterion gives harder data


def test_dat_criterion_falls_to_zero():
    """c_t = max(0, c_max (1 - t/T')), t epochs done: c_max 0.5, T' 100 of 120 (99.96 as a share in one decimal)."""
    for t in (0, 1, 50, 99, 100, 119):
        found = DAT(fosc="ramp:0.5..0@83.3%").search(Progress(1 + t, 120))
        assert found.criterion == pytest.approx(max(0.0, 0.5 * (1 - t / 100)), abs=3e-4)


def test_ates_lies_between_fat_and_madry(batch):
    for margin, other in [(0.0, make(FAT)), (1.0, make(Madry))]:
        one, two = find(make(ATES, margin=margin), *batch), find(other, *batch)
        assert torch.equal(one.backprops, two.backprops)
        assert torch.allclose(one.x_adv, two.x_adv, rtol=0, atol=1e-12)
    assert ATES(margin="ramp:0..1").search(Progress(6, 10)).margin == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("accuracies", "patience", "k"),
    [
        ([], 2, 1),
        ([0.1, 0.2, 0.3, 0.4], 2, 1),  # improves: stays
        ([0.3, 0.3, 0.2], 2, 2),  # twice not better
        ([0.3, 0.2, 0.31, 0.2], 2, 1),  # the wait begins again with every improvement
        ([0.3, 0.2, 0.2, 0.1, 0.2, 0.2], 2, 2),  # and with every new k: 0.1 and 0.2 are improvements of its own
        ([0.3, 0.2, 0.2, 0.1, 0.1, 0.1], 2, 3),
        ([0.5] * 200, 10, 4),  # K = 4
        ([0.5] * 11, 10, 2),
        ([0.5] * 10, 10, 1),
    ],
)
def test_cat_step_count_grows_by_its_rule(accuracies, patience, k):
    history = [{"epoch": i, "own": accuracy} for i, accuracy in enumerate(accuracies, 1)]
    cat, progress = make(CAT, steps=4, patience=patience), Progress(len(history) + 1, 300, history)
    assert cat.search(progress).steps == cat.metrics(progress)["steps"] == cat.own_attack(progress)["steps"] == k


def test_cat_mixes_the_step_counts_up_to_k():
    model = network()
    x, y = images(model, 600)
    history = [{"own": 0.5}] * 40
    found = make(CAT, steps=3, patience=1).search(Progress(41, 50, history))(model, x, y, seeded())
    counts = found.backprops.bincount().tolist()
    assert len(counts) == 4
    assert all(abs(count - 150) < 45 for count in counts)  # four standard deviations
    assert torch.equal(found.x_adv[found.backprops == 0], x[found.backprops == 0])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_searches_with_noise_and_projection_are_capturable(name):
    """PGD-K-tau, of the objectives that have its noise and projection; a ball of radius 0 holds the images alone."""
    objective = make(OBJECTIVES[name])
    assert isinstance(objective.search(BEGIN), KTauPGD) == hasattr(objective, "noise")
    if name != "standard":
        x, y = torch.rand(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
        still = make(OBJECTIVES[name], eps="ramp:0..0.1@50%").search(BEGIN)(None, x, y, seeded())
        assert still.x_adv is x and still.backprops.sum() == 0


@pytest.mark.parametrize("kind", [FAT, Madry, FATForTRADES, MART])
def test_without_projection_the_steps_are_the_bound(batch, kind):
    """Appendix B: from the image, K steps of alpha, held to [0, 1] only; with projection the same steps stay inside."""
    x = batch[1]
    start = "normal" if kind is FATForTRADES else None
    free, held = (find(make(kind, eps=0.02, start=start, project=project), *batch) for project in (False, True))
    reach = (free.x_adv - x).abs().flatten(1).amax(dim=1)
    assert (reach > 0.02).any() and (reach <= 0.03 * free.backprops.double() + 0.01).all()
    assert free.x_adv.min() >= 0 and free.x_adv.max() <= 1
    assert (held.x_adv - x).abs().max() <= 0.02 + 1e-12


def test_standard_training_attacks_nothing(batch):
    found = find(Standard(), *batch)
    assert found.x_adv is batch[1]
    assert found.backprops.sum() == 0


def test_the_search_leaves_train_mode_on(batch):
    find(make(FAT), *batch)
    assert all(module.training for module in batch[0].modules() if not isinstance(module, nn.Identity))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (Madry, {"eps": 8}, "For 8/255 write 8/255"),
        (Madry, {"eps": 0}, "not be 0 throughout"),
        (Madry, {"eps": -0.1}, "not be negative"),
        (FAT, {"tau": 0.5}, "tau must hold whole numbers"),
        (FATForTRADES, {"tau": -1}, "tau must hold whole numbers"),
        (FATForMART, {"tau": "0,1.5@40%"}, "tau must hold whole numbers"),
        (Madry, {"steps": 0}, "steps must be"),
        (DAT, {"step_size": 2}, "step_size must lie"),
        (CAT, {"start": "here"}, "start must be"),
        (FAT, {"noise": -1}, "noise must be"),
        (FAT, {"project": "no"}, "project must be True or False"),
        (MART, {"beta": -1.0}, "beta must be finite and at least 0"),
        (TRADES, {"start": None}, "flat at the image itself"),
        (FATForTRADES, {"start": None}, "flat at the image itself"),
        (DAT, {"fosc": "ramp:0.5..-0.1@50%"}, "fosc must be finite and at least 0"),
        (ATES, {"margin": 2}, r"margin must lie in \[-1, 1\]"),
        (CAT, {"patience": 0}, "patience must be at least 1"),
    ],
)
def test_bad_parameters_are_refused(kind, changes, message):
    with pytest.raises(UserError, match=message):
        make(kind, **changes)


def test_kl_may_start_at_the_image_with_noise():
    assert make(TRADES, start=None, noise=0.001).noise == 0.001


def test_advice_on_unusual_settings():
    assert make(CAT, patience=10).advice(30) == [
        "k grows at most every 11 epochs and cannot pass 3 of 5 in 30; use less patience (--attack.patience)."
    ]
    assert make(FAT, tau=parse("0,1@51")).advice(50) == [
        "tau 0,1@51 (--attack.tau): @51 lies after the last epoch (50)."
    ]
    assert make(FAT, eps=0.01).advice(50) == [
        "a step of 0.03 is longer than the ball (0.01): lower step_size (--attack.step-size)."
    ]
    assert not make(FAT).advice(50)


def test_a_fraction_of_training_needs_schedules_in_per_cent(batch):
    """Counted in epochs, a start would be reached at once."""
    with pytest.raises(UserError, match=r"0,1@51 changes at epoch 51.*per cent"):
        make(FAT, tau="0,1@51")(*batch, progress=0.5)
    with pytest.raises(UserError, match="progress must lie"):
        make(FAT)(*batch, progress=None)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_hot_targets_take_the_step_of_class_numbers(batch, name):
    """The attack is the same bit for bit: it sees the class numbers. The loss is the same up to rounding."""
    model, x, y = batch
    found = []
    for target in (y, soft_targets(y, 4), soft_targets(y, 4, smoothing=0.3)):
        step = make(OBJECTIVES[name])(copy.deepcopy(model), x, target, generator=seeded())
        found.append((step.x_adv, step.loss))
    assert all(torch.equal(x_adv, found[0][0]) for x_adv, _ in found)
    torch.testing.assert_close(found[0][1], found[1][1])
    assert not torch.isclose(found[0][1], found[2][1])


@pytest.mark.parametrize(
    "kind", [kind for kind in OBJECTIVES.values() if kind is not Standard], ids=lambda kind: kind.name
)
def test_every_objective_trains_in_l2(kind, batch):
    model, x, y = batch
    objective = kind(eps=0.8, step_size="eps/4", steps=4, start="normal", norm="l2")
    step = objective(model, x, y, progress=0.9, generator=seeded())  # DAT's data are weak at first
    length = (step.x_adv - x).flatten(1).norm(dim=1)
    assert length.max() <= 0.8 + 1e-9 and length.max() > 0.15
    step.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert objective.norm == "l2" and kind().norm == "linf"


def test_a_part_of_eps_moves_with_eps():
    fat = FAT(eps=0.3, step_size="eps/4", steps=4)
    assert fat.search(Progress(1, 10)).step_size == 0.3 / 4
    assert dataclasses.replace(fat, eps=0.2).search(Progress(1, 10)).step_size == 0.2 / 4
    ramp = FAT(eps="ramp:0..0.2@100%", step_size="eps/4", steps=4)
    assert ramp.search(Progress(6, 10)).step_size == pytest.approx(0.1 / 4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FAT(noise="a"), "noise must be finite and at least 0, got 'a'. Give a number."),
        (lambda: TRADES(beta="6", start="normal"), "beta must be finite and at least 0, got '6'. Give a number."),
        (lambda: FAT(step_size="x"), "step_size must be a number or a part of eps such as 'eps/4', got 'x'."),
        (lambda: FAT(step_size=torch.ones(3)), "must be one number, or a part of eps, got a tensor."),
        (lambda: FAT(norm="l7"), "unknown norm 'l7'."),
        (lambda: FAT(eps=3.0), "Only an L2 radius may exceed 1: norm='l2'."),
        (lambda: CAT(patience="3"), "patience must be at least 1, in whole epochs, got '3'."),
        (lambda: TRADES(start=None), "start='normal' or 'uniform' (--attack.start normal)."),
        (lambda: FAT(start=3), "start must be None, 'uniform' or 'normal', got 3."),
    ],
)
def test_wrong_types_are_named_in_one_line(make, says):
    with pytest.raises(UserError) as refused:
        make()
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_standard_training_checks_its_input(batch):
    model, x, y = batch
    with pytest.raises(UserError, match="pixels must be finite"):
        Standard()(model, 255 * x, y)
    with pytest.raises(UserError, match="floating-point tensor"):
        Standard()(model, x.numpy(), y)


def test_advice_on_tau_above_k_and_on_steps_that_do_not_reach():
    assert FAT(tau=11, steps=10).advice(5) == [
        "tau 11 is above K = 10 steps, so no attack stops early there: that is Madry's PGD-K (--attack.tau, "
        "--attack.steps)."
    ]
    assert FAT(tau="0,12@50%", steps=10).advice(5)[0].startswith("tau 12 is above K")
    assert FAT(eps=0.5, norm="l2").advice(5) == [
        "10 steps of 0.007 reach 0.07 from the start, eps is 0.5: raise steps or step_size (--attack.step-size), for "
        "example to eps/4."
    ]
    assert not FAT(eps=0.5, step_size="eps/10", norm="l2").advice(5)
    assert FAT(eps=0.1, start=None).advice(5) and not FAT(eps=0.1).advice(5)  # 0.07 from the image, or from half-way
    assert not FAT(eps=0.5, project=False).advice(5) and not FAT(tau=10).advice(5)
