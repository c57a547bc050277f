from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparring import models
from sparring.engine.attack.folded import NotFolded, fold, fused_mismatch
from sparring.engine.folded_layers import ConvUnit, Dense, ScaleShift
from sparring.engine.manual import fused_ops as fused_operations
from tests.engine.networks import with_statistics


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        normalize = ([0.5] * 3, [0.2] * 3)
        return with_statistics(models.build(name, num_classes=10, size=(16, 16), normalize=normalize)).to(dtype)


def images(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=dtype)


# Convolutions with a ReLU folded in, batch-norms that stand alone: a WRN normalises sums, which no convolution makes.
NETWORKS = {"tiny_cnn": (3, 0), "small_cnn": (6, 0), "resnet18": (17, 0), "wrn-10-1": (3, 4), "wrn-16-2": (7, 6)}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "kinds"), NETWORKS.items())
def test_folding_keeps_function_and_gradient(name, kinds, fused):
    model, x = build(name), images().requires_grad_()
    network = fold(model, dtype=torch.float64, fused=fused)
    assert network is not None
    relus = sum(isinstance(unit, ConvUnit) and unit.relu for unit in network.units)
    assert (relus, sum(isinstance(unit, ScaleShift) for unit in network.units)) == kinds
    assert network.pointwise == (kinds[1] > 0)
    one, other = model(x), network(x)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(z[:, 3].sum(), x)[0] for z in (one, other)), rtol=1e-9, atol=1e-12)


def test_the_bias_of_a_shortcut_is_shared_and_the_last_layer_pools():
    network = fold(build("resnet18"), dtype=torch.float64, fused=True)
    pairs = network.shared_biases
    assert len(pairs) == 3 and all(other.bias_is_shared and not unit.bias_is_shared for unit, other in pairs)
    assert network.units[-1].pools
    wide = fold(build("wrn-16-2"), dtype=torch.float64, fused=True)  # is compiled: the compiler sees to it
    assert not wide.units[-1].pools
    assert not fold(build("resnet18"), dtype=torch.float64, fused=False).shared_biases


def test_what_two_layers_read_comes_twice():
    network = fold(build("resnet18"), dtype=torch.float64, fused=True)
    # The stem and all residual blocks but the last: each is read by the next block's two ways.
    assert sum(unit.twice for unit in network.units if isinstance(unit, ConvUnit)) == 8
    assert not any(unit.twice for unit in fold(build("resnet18"), dtype=torch.float64, fused=False).units[:-1])


@pytest.mark.parametrize("name", NETWORKS)
def test_refresh_reads_what_training_changed(name):
    model, x = build(name), images()
    network = fold(model, dtype=torch.float64, fused=False)
    assert network is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model.train()(x), torch.arange(4)).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        assert not torch.allclose(network(x), model(x))
        network.refresh()
        torch.testing.assert_close(network(x), model(x), rtol=1e-10, atol=1e-10)


def test_folding_leaves_the_model_alone():
    model = build("resnet18")
    before, keys = {k: v.clone() for k, v in model.state_dict().items()}, [n for n, _ in model.named_modules()]
    fold(model, dtype=torch.bfloat16, fused=False)
    assert [n for n, _ in model.named_modules()] == keys
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_bf16_is_near_and_sees_pixels_at_16_bits():
    model, x = build("resnet18", torch.float32), images(torch.float32)
    network = fold(model, dtype=torch.bfloat16, fused=False)
    assert network is not None
    with torch.no_grad():
        exact, near = model(x), network(x)
    assert near.dtype == torch.float32
    assert (near - exact).norm() / exact.norm() < 0.03
    # Two pixels that bf16 alone cannot tell apart.
    a, b = torch.full((1, 3, 16, 16), 0.9990), torch.full((1, 3, 16, 16), 0.9985)
    assert torch.equal(a.bfloat16(), b.bfloat16())
    first = next(unit for unit in network.units if isinstance(unit, ConvUnit))
    assert not torch.equal(first(a.contiguous()), first(b.contiguous()))


def test_a_convolution_that_others_read_is_not_folded():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(18, 3)

        def forward(self, x):
            h = self.conv(x)
            return self.fc((h + F.relu(self.norm(h))).flatten(1))

    with torch.random.fork_rng():
        model = with_statistics(Forked())
    x = torch.rand(4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    network = fold(model, dtype=torch.float32, fused=False)
    assert network is not None
    assert [type(unit) for unit in network.units] == [ConvUnit, ScaleShift, Dense]
    torch.testing.assert_close(network(x), model(x), rtol=1e-5, atol=1e-5)


class Fickle(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(9, 3)

    def forward(self, x):
        return self.fc(x.flatten(1)) if x.sum() > 0 else self.fc(-x.flatten(1))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.GroupNorm(1, 1), nn.Linear(9, 3)

    def forward(self, x):
        return self.fc(self.norm(x).flatten(1))


@pytest.mark.parametrize("model", [Fickle(), Odd()], ids=["control flow", "a layer not known"])
def test_what_cannot_be_folded_is_refused(model):
    with pytest.raises(NotFolded):
        fold(model, dtype=torch.float32, fused=False)


class Bare(nn.Module):
    """A model whose weights no layer uses, or that has none."""

    def __init__(self, weights):
        super().__init__()
        self.head = nn.Linear(3, 3) if weights else nn.Identity()

    def forward(self, x):
        return x.flatten(1)[:, :4]


@pytest.mark.parametrize("weights", [False, True])
def test_a_model_without_layers_is_folded(weights):
    x = torch.rand(2, 1, 3, 3)
    network = fold(Bare(weights), dtype=torch.float32, fused=False)
    assert network is not None and torch.equal(network(x), x.flatten(1)[:, :4])


def test_the_attack_sees_eval_mode_while_the_model_trains():
    """Dropout is off in the folded network, on in the model, and neither moves the other's mode."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop, self.out = nn.Linear(9, 64), nn.Dropout(0.5), nn.Linear(64, 3)

        def forward(self, x):
            return self.out(F.dropout(self.drop(self.fc(x.flatten(1))), 0.5, self.training))

    model = Dropping().train()
    network = fold(model, dtype=torch.float32, fused=False)
    assert network is not None
    x = torch.rand(4, 1, 3, 3)
    model.train()
    assert torch.equal(network(x), network(x))
    assert model.drop.training
    assert not torch.equal(model(x), model(x))


def test_statistics_without_weights_are_refused():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(9, affine=False), nn.Linear(9, 3))
    with pytest.raises(NotFolded):
        fold(model, dtype=torch.float32, fused=False)


class Shared(nn.Module):
    """One batch-norm in two places: behind a convolution, and alone."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.dense = nn.Linear(3, 4)

    def forward(self, x):
        h = self.norm(self.one(x)).relu()
        return self.dense(self.norm(h + self.two(h)).mean((2, 3)))


def test_a_batch_norm_that_stands_in_two_places():
    model = with_statistics(Shared()).double().train()
    before = model.norm.running_mean.clone()
    network = fold(model, dtype=torch.float64, fused=False)
    x = images()
    assert model.norm.training  # its mode is untouched
    found = network(x)
    assert torch.equal(model.norm.running_mean, before)
    torch.testing.assert_close(found, model.eval()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet18", "wrn-16-2"])
def test_fused_operations_are_checked_before_they_are_trusted(name, dtype, monkeypatch):
    model, x = build(name, torch.float32), images(torch.float32)
    fused = fold(model, dtype=dtype, fused=True)
    assert not fused_mismatch(fused, model, x)

    def missing(*args, **kwargs):
        raise RuntimeError("no such operation on this device")

    def wrong(x, z, weight, bias, stride, padding, *, twice):
        y = torch.relu(-F.conv2d(x, weight, bias, stride, padding))
        return (y, y) if twice else y

    for fault in (missing, wrong):
        monkeypatch.setattr(importlib.import_module("sparring.engine.folded_layers"), "conv_relu", fault)
        assert fused_mismatch(fused, model, x)


def test_a_deep_network_is_compared_in_its_own_precision():
    """bf16 turns its gradient by more than 0.02 of a cosine, fused or not."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        normalize = ([0.49, 0.48, 0.45], [0.25, 0.24, 0.26])
        model = models.build("wrn-28-4", num_classes=10, normalize=normalize)
        for _ in range(3):
            model.train()(torch.rand(32, 3, 16, 16))
    x = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    fused = fold(model.eval(), dtype=torch.bfloat16, fused=True)
    assert fused.dtype == torch.bfloat16 and not fused_mismatch(fused, model, x)


def test_a_fault_in_the_backward_pass_alone_is_seen(monkeypatch):
    model, x = build("resnet18", torch.float32), images(torch.float32)
    network = fold(model, dtype=torch.bfloat16, fused=True)
    monkeypatch.setattr(
        fused_operations, "_relu_back", lambda *gradients, y, among=None: gradients[0]
    )  # forgets the mask and a sum
    assert fused_mismatch(network, model, x)


def test_a_fault_at_many_images_alone_is_seen(monkeypatch):
    model, x = build("wrn-16-2", torch.float32), images(torch.float32)
    network = fold(model, dtype=torch.float32, fused=True)
    units = importlib.import_module("sparring.engine.folded_layers")
    really = units.conv_relu

    def small(x, *args, **kwargs):
        if len(x) > 8:
            raise RuntimeError("out of resources: shared memory")
        return really(x, *args, **kwargs)

    monkeypatch.setattr(units, "conv_relu", small)
    assert not fused_mismatch(network, model, x[:8]) and fused_mismatch(network, model, x[:8], sizes=(4, 16))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old weight_norm announces its successor
@pytest.mark.parametrize(
    ("computed", "why"),
    [
        (nn.utils.weight_norm, "a layer has hooks"),
        (nn.utils.parametrizations.spectral_norm, "a layer's weight is computed from others"),
    ],
)
def test_a_weight_that_is_computed_in_the_forward_pass_is_not_folded(computed, why):
    """The folded copy would read it before it is computed anew."""
    model = nn.Sequential(computed(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.Flatten())
    with pytest.raises(NotFolded, match=why):
        fold(model, dtype=torch.float32, fused=False)
