"""Objectives that did not beat FAT follow their definitions."""

from __future__ import annotations

import pytest
import torch

from sparring.attacks import friendliest_pgd
from sparring.errors import UserError
from sparring.objectives import FAT, OBJECTIVES, Progress
from sparring.objectives.contrib.by_definition import FATByLoss, FATByProbability
from sparring.objectives.contrib.paced import FATPaced
from sparring.objectives.contrib.patient import FATPatient
from tests.attacks.conftest import images, network
from tests.objectives.test_objectives import make, seeded


def test_objectives_are_registered():
    kinds = (FATByLoss, FATByProbability, FATPaced, FATPatient)
    assert [OBJECTIVES[kind.name] for kind in kinds] == list(kinds)


@pytest.mark.parametrize(("kind", "by"), [(FATByLoss, "loss"), (FATByProbability, "probability")])
@pytest.mark.parametrize("downhill", [True, False])
def test_friendly_by_definition_uses_the_rho_of_the_epoch(kind, by, downhill):
    model = network()
    with torch.no_grad():
        model[-1].weight.mul_(8)
    x, y = images(model, 32)
    y[:8] = (y[:8] + 1) % 4
    objective = make(kind, eps=0.3, step_size=0.06, rho="0.05,0.3@6", downhill=downhill)
    points = []
    for epoch, rho in ((1, 0.05), (6, 0.3)):
        found = objective.search(Progress(epoch, 10))(model, x, y, seeded())
        numbers = {"eps": 0.3, "step_size": 0.06, "steps": 5, "downhill": downhill}
        expected = friendliest_pgd(model, x, y, rho=rho, by=by, generator=seeded(), **numbers)
        assert torch.equal(found.x_adv, expected.x_adv) and torch.equal(found.backprops, expected.backprops)
        points.append(found.x_adv)
    assert not torch.equal(*points)


def taus(objective, history):
    """The tau of the first epoch and of every epoch after these records."""
    places = [Progress(n + 1, 50, history[:n]) for n in range(len(history) + 1)]
    assert [objective.metrics(place)["tau"] for place in places] == [objective.search(place).tau for place in places]
    return [objective.search(place).tau for place in places]


@pytest.mark.parametrize(
    ("share", "backprops", "expected"),
    [
        (0.25, [0.9, 2.5, 3.99, 4.0, 7.9, 8.0, 10.0, 5.0], [0, 0, 0, 0, 1, 1, 2, 2, 1]),
        (0.5, [1.9, 2.0, 10.0], [0, 0, 1, 5]),
        (0.0, [10.0], [0, 0]),  # tau 0 throughout
        (1.0, [10.0], [0, 10]),  # Madry once every attack takes all its steps
    ],
)
def test_paced_tau_is_a_share_of_the_previous_steps(share, backprops, expected):
    history = [{"epoch": i, "backprops": b, "pgd10": 0.0} for i, b in enumerate(backprops, 1)]
    assert taus(make(FATPaced, steps=10, share=share), history) == expected


def test_patient_tau_grows_when_robustness_stalls():
    history = [{"epoch": i, "backprops": 9.0, "pgd10": a} for i, a in enumerate([0.3, 0.4, 0.4, 0.4, 0.5, 0.4, 0.4], 1)]
    assert taus(make(FATPatient, steps=10, patience=2), history) == [0, 0, 0, 0, 1, 1, 1, 2]
    stalled = [{"epoch": i, "backprops": 9.0, "pgd10": 0.3} for i in range(40)]
    assert taus(make(FATPatient, steps=4, patience=2), stalled)[-1] == 4  # K: PGD-K-K is PGD-K


@pytest.mark.parametrize("kind", [FATPaced, FATPatient])
def test_tau_by_rule_is_fat_with_that_tau(kind):
    begin = Progress(1, 10)
    assert make(kind).search(begin) == make(FAT, tau=0).search(begin)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (FATByLoss, {"rho": 0}, "rho must be finite and above 0"),
        (FATByLoss, {"rho": "ramp:0.5..-1"}, "rho must be finite and above 0"),
        (FATByProbability, {"rho": "ramp:0.1..1"}, "rho must stay below 1 for fat-by-probability"),
        (FATByLoss, {"downhill": 1}, "downhill must be True or False"),
        (FATPaced, {"share": -0.1}, r"share must lie in \[0, 1\]"),
        (FATPaced, {"share": 4}, "Write for example 1/4"),
        (FATPatient, {"patience": 0}, "patience must be at least 1"),
    ],
)
def test_bad_parameters_are_refused(kind, changes, message):
    with pytest.raises(UserError, match=message):
        make(kind, **changes)
