"""Objectives: friendly at tau = K is the original, bitwise; gradients equal the equations written out."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from sparring.attacks import fosc_pgd, friendliest_pgd, friendly_pgd, pgd
from sparring.objectives import OBJECTIVES, Attack
from sparring.schedules import constant, parse
from tests.attacks.conftest import images, network

ATTACK = Attack(eps=constant(0.1), step_size=0.03, steps=5, tau=constant(5), start="uniform")


@pytest.fixture
def batch():
    model = network().train()
    return model, *images(model, 16)


def seeded():
    return torch.Generator().manual_seed(9)


def one_update(name, model, x, y, attack):
    """The gradients and batch-norm statistics after one search and one backward pass."""
    model = copy.deepcopy(model).train()
    objective = OBJECTIVES[name]
    found = objective.find(model, x, y, attack.at(1, 10), seeded())
    loss = objective.loss(model, x, found.x_adv, y, 6.0)
    loss.backward()
    return found, loss, [p.grad for p in model.parameters()], list(model.buffers())


@pytest.mark.parametrize(("friendly", "original"), [("fat", "madry"), ("fat-trades", "trades"), ("fat-mart", "mart")])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_friendly_at_tau_k_is_the_original_bitwise(batch, friendly, original, noise):
    attack = replace(ATTACK, noise=noise)
    one, other = (one_update(name, *batch, attack) for name in (friendly, original))
    assert torch.equal(one[0].x_adv, other[0].x_adv)
    assert (one[0].backprops == 5).all()
    assert torch.equal(one[1], other[1])
    for kind in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(one[kind], other[kind], strict=True))


@pytest.mark.parametrize(("friendly", "original"), [("fat", "madry"), ("fat-trades", "trades"), ("fat-mart", "mart")])
def test_friendly_below_k_is_another(batch, friendly, original):
    attack = replace(ATTACK, tau=constant(0))
    assert (
        one_update(friendly, *batch, attack)[0].backprops.sum()
        < one_update(original, *batch, attack)[0].backprops.sum()
    )


def test_the_inner_losses(batch):
    """TRADES climbs the KL, all others the cross-entropy."""
    model, x, y = batch
    for name, loss in [("madry", "ce"), ("trades", "kl"), ("mart", "ce")]:
        expected = pgd(model, x, y, eps=0.1, step_size=0.03, steps=5, loss=loss, generator=seeded())
        assert torch.equal(one_update(name, model, x, y, ATTACK)[0].x_adv, expected)
    found = friendly_pgd(
        model, x, y, eps=0.1, step_size=0.03, steps=5, tau=1, loss="kl", start="uniform", generator=seeded()
    )
    attack = replace(ATTACK, tau=constant(1))
    assert torch.equal(one_update("fat-trades", model, x, y, attack)[0].x_adv, found.x_adv)


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
    found, loss, gradients, statistics = one_update(name, model, x, y, replace(ATTACK, tau=constant(1)))
    reference = copy.deepcopy(model).train()
    expected = longhand(name, reference, x, found.x_adv, y)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    for ours, theirs in zip(gradients, reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs.grad, rtol=1e-8, atol=1e-12)
    # The order of the two forwards shows in batch-norm's running statistics.
    for ours, theirs in zip(statistics, reference.buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_dat_stops_by_fosc_at_the_criterion_of_the_epoch(batch):
    model, x, y = batch
    counts = []
    for criterion in (0.5, 0.02, 0.0):
        found = one_update("dat", model, x, y, replace(ATTACK, fosc=constant(criterion)))[0]
        expected = fosc_pgd(model, x, y, eps=0.1, step_size=0.03, steps=5, criterion=criterion, generator=seeded())
        assert torch.equal(found.x_adv, expected.x_adv)
        counts.append(int(found.backprops.sum()))
    assert counts == sorted(set(counts))  # the smaller the criterion, the harder the data


def test_the_criterion_of_dat_falls_to_zero():
    """c_t = max(0, c_max (1 - t/T')), t epochs done: c_max 0.5, T' 100 of 120 (99.96 as a share in one decimal)."""
    attack = replace(ATTACK, fosc=parse("ramp:0.5..0@83.3%"))
    for t in (0, 1, 50, 99, 100, 119):
        assert attack.at(1 + t, 120).fosc == pytest.approx(max(0.0, 0.5 * (1 - t / 100)), abs=3e-4)


def test_ates_lies_between_fat_and_madry(batch):
    ends = [(0.0, "fat"), (1.0, "madry")]
    for margin, other in ends:
        one = one_update("ates", *batch, replace(ATTACK, margin=constant(margin)))[0]
        two = one_update(other, *batch, replace(ATTACK, tau=constant(0)))[0]
        assert torch.equal(one.backprops, two.backprops)
        assert torch.allclose(one.x_adv, two.x_adv, rtol=0, atol=1e-12)
    assert replace(ATTACK, margin=parse("ramp:0..1")).at(6, 10).margin == pytest.approx(0.5)


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
def test_the_step_count_of_cat_grows_by_its_rule(accuracies, patience, k):
    setting = replace(ATTACK, steps=4, patience=patience).at(1, 10)
    records = [{"epoch": i, "own": accuracy} for i, accuracy in enumerate(accuracies, 1)]
    assert OBJECTIVES["cat"].adapt(setting, records) == replace(setting, steps=k)
    assert OBJECTIVES["madry"].adapt(setting, records) == setting


def test_cat_mixes_the_step_counts_up_to_k():
    model = network()
    x, y = images(model, 600)
    found = one_update("cat", model, x, y, replace(ATTACK, steps=3))[0]
    counts = found.backprops.bincount().tolist()
    assert len(counts) == 4
    assert all(abs(count - 150) < 45 for count in counts)  # four standard deviations
    assert torch.equal(found.x_adv[found.backprops == 0], x[found.backprops == 0])


@pytest.mark.parametrize(("name", "by"), [("fat-by-loss", "loss"), ("fat-by-probability", "probability")])
@pytest.mark.parametrize("downhill", [True, False])
def test_friendly_by_definition_is_its_search_at_the_rho_of_the_epoch(name, by, downhill):
    model = network()
    with torch.no_grad():
        model[-1].weight.mul_(8)
    x, y = images(model, 32)
    y[:8] = (y[:8] + 1) % 4
    attack = replace(ATTACK, eps=constant(0.3), step_size=0.06, rho=parse("0.05,0.3@6"), downhill=downhill)
    counts = []
    for epoch, rho in ((1, 0.05), (6, 0.3)):
        found = OBJECTIVES[name].find(model, x, y, attack.at(epoch, 10), seeded())
        numbers = {"eps": 0.3, "step_size": 0.06, "steps": 5, "downhill": downhill}
        expected = friendliest_pgd(model, x, y, rho=rho, by=by, generator=seeded(), **numbers)
        assert torch.equal(found.x_adv, expected.x_adv) and torch.equal(found.backprops, expected.backprops)
        counts.append(found.x_adv)
    assert not torch.equal(*counts)
    assert not OBJECTIVES[name].friendly  # tau means nothing to it


def taus(name, attack, records):
    """The tau of every epoch that follows these records, and of the first."""
    setting = attack.at(1, 10)
    return [OBJECTIVES[name].adapt(setting, records[:n]).tau for n in range(len(records) + 1)]


@pytest.mark.parametrize(
    ("share", "backprops", "expected"),
    [
        (0.25, [0.9, 2.5, 3.99, 4.0, 7.9, 8.0, 10.0, 5.0], [0, 0, 0, 0, 1, 1, 2, 2, 1]),
        (0.5, [1.9, 2.0, 10.0], [0, 0, 1, 5]),
        (0.0, [10.0], [0, 0]),  # tau 0 throughout
        (1.0, [10.0], [0, 10]),  # Madry once every attack takes all its steps
    ],
)
def test_the_paced_tau_is_a_share_of_the_last_epochs_steps(share, backprops, expected):
    records = [{"epoch": i, "backprops": b, "pgd10": 0.0} for i, b in enumerate(backprops, 1)]
    assert taus("fat-paced", replace(ATTACK, steps=10, share=share, tau=constant(7)), records) == expected


def test_the_patient_tau_grows_when_robustness_stalls():
    records = [{"epoch": i, "backprops": 9.0, "pgd10": a} for i, a in enumerate([0.3, 0.4, 0.4, 0.4, 0.5, 0.4, 0.4], 1)]
    attack = replace(ATTACK, steps=10, patience=2)
    assert taus("fat-patient", attack, records) == [0, 0, 0, 0, 1, 1, 1, 2]
    stalled = [{"epoch": i, "backprops": 9.0, "pgd10": 0.3} for i in range(40)]
    assert taus("fat-patient", replace(attack, steps=4), stalled)[-1] == 4  # K: PGD-K-K is PGD-K


@pytest.mark.parametrize("name", ["fat-paced", "fat-patient"])
def test_a_tau_by_rule_is_fat_with_that_tau(batch, name):
    """Same search, same loss: only the number is another's."""
    model, x, y = batch
    found = OBJECTIVES[name].find(model, x, y, replace(ATTACK, tau=constant(1)).at(1, 10), seeded())
    expected = OBJECTIVES["fat"].find(model, x, y, replace(ATTACK, tau=constant(1)).at(1, 10), seeded())
    assert torch.equal(found.x_adv, expected.x_adv) and OBJECTIVES[name].friendly and OBJECTIVES[name].walks


@pytest.mark.parametrize("name", ["cat", "dat", "ates", "fat-by-loss", "fat-by-probability"])
def test_an_own_attack_does_not_walk(batch, name):
    def walk(*args, **kwargs):
        raise AssertionError

    model, x, y = batch
    objective = OBJECTIVES[name]
    assert not objective.walks
    objective.find(model, x, y, ATTACK.at(1, 10), seeded(), walk)
    still = objective.find(model, x, y, replace(ATTACK.at(1, 10), eps=0.0), seeded(), walk)
    assert still.x_adv is x


@pytest.mark.parametrize("name", ["fat", "madry", "fat-trades", "mart", "fat-paced"])
def test_without_projection_the_steps_are_the_bound(batch, name):
    """Appendix B: from the image, K steps of alpha, held to [0, 1] only; with projection the same steps stay inside."""
    model, x, y = batch
    attack = replace(ATTACK, eps=constant(0.02), project=False, start=None)
    free, held = (one_update(name, model, x, y, replace(attack, project=project))[0] for project in (False, True))
    reach = (free.x_adv - x).abs().flatten(1).amax(dim=1)
    assert (reach > 0.02).any() and (reach <= 0.03 * free.backprops.double() + 1e-12).all()
    assert free.x_adv.min() >= 0 and free.x_adv.max() <= 1
    assert (held.x_adv - x).abs().max() <= 0.02 + 1e-12


def test_standard_training_searches_nothing(batch):
    model, x, y = batch
    found = one_update("standard", model, x, y, ATTACK)[0]
    assert found.x_adv is x
    assert found.backprops.sum() == 0


def test_an_eps_of_zero_is_the_image(batch):
    """A ramp may begin at 0."""
    attack = replace(ATTACK, eps=parse("ramp:0..0.1@50%"))
    assert torch.equal(one_update("fat", *batch, attack)[0].x_adv, batch[1])
    assert attack.at(6, 10).eps == pytest.approx(0.1)


def test_the_search_leaves_train_mode_on(batch):
    model, x, y = batch
    objective = OBJECTIVES["fat"]
    objective.find(model, x, y, ATTACK.at(1, 10), seeded())
    assert all(module.training for module in model.modules() if not isinstance(module, nn.Identity))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": constant(8)}, "For 8/255 write 8/255"),
        ({"eps": constant(0)}, "not be 0 throughout"),
        ({"eps": constant(-0.1)}, "not be negative"),
        ({"tau": constant(0.5)}, "tau must hold whole numbers"),
        ({"tau": constant(-1)}, "tau must hold whole numbers"),
        ({"steps": 0}, "steps must be"),
        ({"step_size": 2}, "step_size must lie"),
        ({"start": "here"}, "start must be"),
        ({"noise": -1}, "noise must be"),
        ({"fosc": parse("ramp:0.5..-0.1@50%")}, "attack.fosc must be finite and at least 0"),
        ({"margin": constant(2)}, r"attack.margin must lie in \[-1, 1\]"),
        ({"rho": constant(0)}, "attack.rho must be finite and above 0"),
        ({"rho": parse("ramp:0.5..-1")}, "attack.rho must be finite and above 0"),
        ({"share": -0.1}, r"attack.share must lie in \[0, 1\]"),
        ({"share": 4}, "Write for example 1/4"),
        ({"patience": 0}, "attack.patience must be at least 1"),
    ],
)
def test_bad_attacks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(ATTACK, **changes)
