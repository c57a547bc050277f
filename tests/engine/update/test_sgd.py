"""SGD of the fast engine equals torch's, for every memory layout of a gradient."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch

from sparring import recipes
from sparring.engine.layout import like
from sparring.engine.update.descent import Descent
from sparring.training import loop


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_any_layout_are_applied(layout):
    weight = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradient = torch.arange(24.0).reshape(3, 2, 2, 2).to(memory_format=layout)
    twin = weight.detach().clone().requires_grad_()
    ours, theirs = (torch.optim.SGD([w], lr=0.5, momentum=0.9, weight_decay=0.1) for w in (weight, twin))
    descend = Descent(ours, [weight], [weight])
    descend.lr.fill_(0.5)
    for _ in range(2):
        descend(torch.zeros(()), [gradient])
        twin.grad = gradient.clone()
        theirs.step()
    torch.testing.assert_close(weight, twin)


@pytest.mark.parametrize("objective", ["standard", "fat-mart"])
def test_engines_agree_with_a_smaller_last_batch_of_grey_images(tmp_path, objective):
    """Grey images and their gradients may be channels_last; full batches are copied, the last is not."""
    name = "standard-digits" if objective == "standard" else "fat-mart-digits"
    config = replace(recipes.find(name).config, epochs=1, batch_size=500, validation=120)
    plain, fast = (
        loop.train(config, tmp_path / kind, tensorboard=False, engine=kind).state_dict() for kind in ("plain", "fast")
    )
    for key in plain:
        torch.testing.assert_close(fast[key], plain[key], rtol=2e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_gradient_is_cast_to_the_precision_of_its_weight():
    weight = torch.zeros(2, 3)
    gradient = torch.ones(2, 3)
    assert like(gradient, weight, torch.float32) is gradient
    assert like(gradient, weight, torch.bfloat16).dtype == torch.bfloat16


def test_the_kernel_is_not_given_a_group_with_a_rate_of_its_own():
    """With the first group frozen the schedule is that group's, and the other keeps its ratio to it."""
    first, last = torch.zeros(3), torch.zeros(3)
    first, last = torch.nn.Parameter(first, requires_grad=False), torch.nn.Parameter(last)
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1e-4}, {"params": [last], "lr": 1e-2}], lr=1e-4)
    kernels = types.SimpleNamespace(DescendAll=lambda *_, **__: pytest.fail("the kernel knows one rate"))
    descent = Descent(optimizer, [last], [last], kernels=kernels)
    descent.lr.fill_(1e-4)
    descent(torch.tensor(1.0), [torch.ones(3)])
    torch.testing.assert_close(last.detach(), torch.full((3,), -1e-2))
