from __future__ import annotations

import pytest
import torch

from sparring.attacks import friendly_pgd
from sparring.bench.literal_loop import literal_pgd
from tests.attacks.conftest import images, network


@pytest.mark.parametrize("tau", [0, 1, 3, 8])
def test_literal_loop_equals_friendly_pgd(tau):
    model = network()
    x, y = images(model, 20)
    setting = {"eps": 0.1, "step_size": 0.02, "steps": 8, "tau": tau, "noise": 0.0}
    x_adv, labels, origins, backprops = literal_pgd(model, x, y, generator=torch.Generator().manual_seed(1), **setting)
    found = friendly_pgd(model, x, y, start="uniform", generator=torch.Generator().manual_seed(1), **setting)
    assert backprops == found.backprops.sum()
    order = [next(i for i in range(len(x)) if torch.equal(x[i], origin)) for origin in origins]
    assert sorted(order) == list(range(len(x)))
    torch.testing.assert_close(x_adv, found.x_adv[order], rtol=0, atol=1e-12)
    assert torch.equal(labels, y[order])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_noise_is_added_and_natural_images_are_predicted_once():
    model = network()
    x, y = images(model, 20)
    seen = []
    hook = model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    setting = {"eps": 0.1, "step_size": 0.02, "steps": 4, "tau": 4, "noise": 0.01}
    x_adv, *_ = literal_pgd(model, x, y, generator=torch.Generator().manual_seed(1), **setting)
    hook.remove()
    assert len(seen) == 1 + 4 and torch.equal(seen[0], x)
    found = friendly_pgd(model, x, y, start="uniform", generator=torch.Generator().manual_seed(1), **setting)
    torch.testing.assert_close(x_adv, found.x_adv, rtol=0, atol=1e-12)
