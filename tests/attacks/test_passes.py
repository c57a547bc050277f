"""One pass of a shrinking set: the sizes the network sees, and a backward pass for some of the examples."""

from __future__ import annotations

import pytest
import torch

from sparring.attacks import friendly_pgd, passes
from sparring.attacks.friendly import TauLeft
from sparring.attacks.losses import InnerLoss
from sparring.attacks.pgd import pgd_loop
from tests.attacks.conftest import images, network
from tests.attacks.oracle import literal_friendly_pgd

SETTINGS = {"eps": 0.1, "step_size": 0.02, "steps": 8}


class InTwo:
    """A model in two passes, by autograd: what it went back for is noted."""

    def __init__(self, model) -> None:
        self.model, self.sizes, self.backs = model, [], []

    def __call__(self, x):
        return self.model(x)

    def forward_back(self, x):
        self.sizes.append(len(x))
        point = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            logits = self.model(point)

        def back(gradient, among):
            self.backs.append(len(gradient))
            whole = torch.zeros_like(logits)
            whole[slice(None) if among is None else among] = gradient
            (found,) = torch.autograd.grad(logits, point, whole, retain_graph=True)
            return found if among is None else found[among]

        return logits.detach(), back


@pytest.mark.parametrize("tau", [0, 1, 8])
def test_two_passes_equal_the_literal_loop(tau, monkeypatch):
    monkeypatch.setattr(passes, "_FEW", 1)  # these images are small
    model = network()
    x, y = images(model, 40)
    in_two = InTwo(model.eval())
    found = friendly_pgd(in_two, x, y, tau=tau, **SETTINGS)
    rest = {"tau": tau, "loss": "ce", "start": None, "noise": 0.0, "project": True, "seed": 5}
    x_adv, backprops = literal_friendly_pgd(model, x, y, **SETTINGS, **rest)
    assert torch.equal(found.backprops, backprops)
    assert torch.allclose(found.x_adv, x_adv, rtol=0, atol=1e-12)
    assert sum(in_two.backs) < sum(in_two.sizes) or tau == 8  # those that stop cost no gradient
    assert all(size % 2 == 0 for size in in_two.sizes + in_two.backs)


def test_few_sizes_on_a_cpu_and_the_same_examples():
    model = network()
    x, y = images(model, 64)
    sizes = []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    found = friendly_pgd(model, x, y, tau=0, **SETTINGS)
    assert all(size % 4 == 0 for size in sizes) and len(set(sizes)) > 2
    filled = list(sizes)
    x_adv, backprops = literal_friendly_pgd(
        model, x, y, **SETTINGS, tau=0, loss="ce", start=None, noise=0.0, project=True, seed=5
    )
    assert torch.equal(found.backprops, backprops)
    assert torch.allclose(found.x_adv, x_adv, rtol=0, atol=1e-12)
    # A hook sees the active examples and no others.
    sizes.clear()
    seen = []
    inner = InnerLoss("ce", model, x)
    pgd_loop(
        model, x, y, start=x, loss=inner, stop=TauLeft(0, y), hook=lambda at: seen.append(len(at.x_adv)), **SETTINGS
    )
    assert sizes == seen
    assert [passes.rounded(size, 64) for size in seen[:-1]] == filled


@pytest.mark.parametrize(
    ("count", "batch", "size"), [(1, 64, 4), (61, 64, 64), (5, 8, 5), (100, 128, 104), (33, 33, 33)]
)
def test_whole_sizes(count, batch, size):
    assert passes.rounded(count, batch) == size
    rows = torch.arange(count)
    assert passes.filled(rows, size)[:count].equal(rows) and len(passes.filled(rows, size)) == size
