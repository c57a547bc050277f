"""Our PGD against foolbox's, which shares no line with it, in both norms: the same images, float64, no random start.

Tolerance: 1e-12 per pixel. Foolbox clips in another order, so the last bits differ; a sign could flip only where a
gradient is 0 to rounding, and no pixel here has such a one.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sparring.attacks import pgd
from sparring.evaluation import PGDAttack, Protocol, evaluate

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network after a few steps of training, and digits it has not seen."""
    data = load_digits()
    x, y = torch.tensor(data.images[:, None] / 16, dtype=torch.float64), torch.tensor(data.target).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Softplus(), nn.Flatten(), nn.Linear(288, 10)
        ).double()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(40):
        part = slice(30 * step, 30 * (step + 1))
        optimiser.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimiser.step()
    return model.eval(), x[1400:1600], y[1400:1600]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("eps", "step_size", "steps"), [(0.1, 0.1, 1), (0.1, 0.025, 20), (0.3, 0.01, 40)])
def test_the_same_adversarial_examples(digits, eps, step_size, steps):
    import foolbox

    model, x, y = digits
    ours = pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, start=None)
    attack = foolbox.attacks.LinfPGD(abs_stepsize=step_size, steps=steps, random_start=False)
    theirs, _, success = attack(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=eps)
    assert (ours - theirs).abs().max() <= TOLERANCE
    protocol = Protocol("check", "", eps, (PGDAttack("pgd", steps, step_size, start=None),))
    record = evaluate(model, x, y, protocol, doubts=False)["pgd"]
    assert torch.equal(record.correct, ~success.cpu())
    assert steps == 1 or record.accuracy < 0.9


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("eps", "step_size", "steps"), [(0.5, 0.5, 1), (0.5, 0.125, 20), (1.5, 0.05, 40)])
def test_the_same_adversarial_examples_in_l2(digits, eps, step_size, steps):
    import foolbox

    model, x, y = digits
    ours = pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, start=None, norm="l2")
    attack = foolbox.attacks.L2PGD(abs_stepsize=step_size, steps=steps, random_start=False)
    theirs, _, success = attack(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=eps)
    assert (ours - theirs).abs().max() <= TOLERANCE
    protocol = Protocol("check", "", eps, (PGDAttack("pgd", steps, step_size, start=None),))
    record = evaluate(model, x, y, protocol, eps=eps, norm="l2", doubts=False)["pgd"]
    assert torch.equal(record.correct, ~success.cpu())
    assert record.norm == "l2" and record.accuracy < 0.95
