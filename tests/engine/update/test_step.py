from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from sparring.attacks.losses import soft_targets
from sparring.engine.cuda_graphs import NotCapturable
from sparring.engine.ema import WeightAverage
from sparring.engine.plain import PlainUpdate
from sparring.engine.update.exchange import ALONE, Alone
from sparring.engine.update.step import FastUpdate
from sparring.objectives import OBJECTIVES
from tests.attacks.conftest import images, network
from tests.engine.streams import Warm


def pair(name: str):
    """A plain and a fast update of equal models."""
    updates = []
    of = OBJECTIVES[name]().loss
    for kind in (PlainUpdate, FastUpdate):
        model = network().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4)

        if kind is PlainUpdate:
            updates.append((model, PlainUpdate(model, optimizer, of)))
        else:
            given = {"batch": 16, "shape": (1, 6, 6), "device": torch.device("cpu"), "half": False, "compiled": False}
            fast = FastUpdate(model, optimizer, of, after=lambda: None, **given)
            fast.x, fast.x_adv = fast.x.double(), fast.x_adv.double()
            updates.append((model, fast))
    return updates


@pytest.mark.parametrize("awp", [0.0, 0.01])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_fast_equals_plain(name, awp):
    (plain_model, plain), (fast_model, fast) = pair(name)
    x, y = images(plain_model.eval(), 40)
    plain_model.train()
    for lr, rows in [(0.1, slice(0, 16)), (0.05, slice(16, 32)), (0.05, slice(32, 40)), (0.01, slice(0, 16))]:
        batch = x[rows], (x[rows] + 0.01).clamp(0, 1), y[rows]
        one, other = plain(*batch, lr, awp), fast(*batch, lr, awp)
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-6, atol=1e-7)
    for a, b in zip(plain_model.state_dict().values(), fast_model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)  # the fast one keeps lr in fp32


def test_last_batch_is_captured_at_its_second_use():
    (plain_model, plain), (fast_model, fast) = pair("madry")
    x, y = images(plain_model.eval(), 40)
    plain_model.train()
    for count, graphs in [
        (16, 1),
        (10, 1),
        (16, 1),
        (10, 2),
        (16, 2),
        (10, 2),
        (7, 2),
        (10, 2),
        (10, 2),
        (3, 2),
        (3, 3),
    ]:
        batch = x[:count], (x[:count] + 0.01).clamp(0, 1), y[:count]
        torch.testing.assert_close(plain(*batch, 0.05).float(), fast(*batch, 0.05).float(), rtol=1e-6, atol=1e-7)
        assert len(fast.graphs) == graphs
    for a, b in zip(plain_model.state_dict().values(), fast_model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def trained(count, updates=3):
    """Weights, their average and momenta after updates with `count` of eight images; and the number of settles."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 4)).train()
    average, settled = WeightAverage(model, 0.9), []
    given = {"batch": 8, "shape": (1, 6, 6), "device": torch.device("cpu"), "half": False, "compiled": False}
    given |= {"after": average.move, "also": list(average.state().values())}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    update = FastUpdate(model, optimizer, lambda m, x, x_adv, y: nn.functional.cross_entropy(m(x_adv), y), **given)
    update.descent.settle = lambda: settled.append(1)
    x, y = torch.rand(8, 1, 6, 6)[:count], (torch.arange(8) % 4)[:count]
    for _ in range(updates):
        update(x, x, y, 0.05)
    return [*model.state_dict().values(), *average.state().values(), *update.descent.state], len(settled)


@pytest.mark.parametrize("count", [8, 5])
def test_warm_up_of_a_capture_leaves_no_trace(count, monkeypatch):
    plain, _ = trained(count)
    monkeypatch.setattr("sparring.engine.update.step.Captured", Warm)
    warm, settled = trained(count)
    assert settled == 1
    for one, other in zip(warm, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_failed_capture_leaves_the_weights_unchanged(monkeypatch):
    class Fails(Warm):
        def __init__(self, work, pool):
            super().__init__(work, pool)
            raise RuntimeError("no memory")

    monkeypatch.setattr("sparring.engine.update.step.Captured", Fails)
    (_, _), (model, fast) = pair("madry")
    before = copy.deepcopy(model.state_dict())
    x, y = images(model.eval(), 16)
    model.train()
    with pytest.raises(RuntimeError, match="no memory"):
        fast(x, x, y, 0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Counting(Alone):
    """An exchange that counts its calls outside rehearsals, and may replace what it is given."""

    def __init__(self, meet=lambda tensors: None):
        self.meet, self.calls, self.rehearsing = meet, 0, False

    def __call__(self, tensors):
        if not self.rehearsing:
            self.calls += 1
            self.meet(tensors)

    @contextmanager
    def rehearsal(self):
        self.rehearsing = True
        yield
        self.rehearsing = False


@pytest.mark.parametrize("count", [16, 7, 0])
def test_an_update_exchanges_once_whatever_its_size(monkeypatch, count):
    """Another process may have a last batch of another size, and takes no part in a warm-up."""
    monkeypatch.setattr("sparring.engine.update.step.Captured", Warm)
    (_, _), (model, fast) = pair("madry")
    fast.exchange = Counting()
    x, y = images(model.eval(), 16)
    model.train()
    for updates in (1, 2, 3):
        fast(x[:count], x[:count], y[:count], 0.1)
        assert fast.exchange.calls == updates
    assert len(fast.graphs) == (count > 0)


@pytest.mark.parametrize("kind", ["plain", "fast"])
@pytest.mark.parametrize("awp", [0.0, 0.01])
def test_a_process_without_images_joins_every_exchange(kind, awp):
    """Its own loss and gradient are zeros, for the same tensors."""
    seen = []
    for count in (8, 0):
        model, update = pair("madry")[0 if kind == "plain" else 1]
        update.exchange = Counting(lambda tensors: seen.append([tuple(tensor.shape) for tensor in tensors]))
        update.exchange.mean = lambda tensors: seen.append([tuple(tensor.shape) for tensor in tensors])
        x, y = images(model.eval(), 16)
        model.train()
        loss = update(x[:count], x[:count], y[:count], 0.1, awp)
        assert not update.failed() and (loss > 0 if count else loss == 0)
    half = len(seen) // 2
    assert half == (2 if awp else 1) and seen[:half] == seen[half:]


def test_non_finite_loss_changes_no_weight():
    for model, update in pair("madry"):
        before = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
        x, y = images(model.eval(), 16)
        model.train()
        update(x, x * float("nan"), y, 0.1)
        assert update.failed()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_exchanging_processes_take_the_step_of_the_joint_batch(kind):
    """The mean of the gradients of two halves is the gradient of the whole; a non-finite loss of one stops both."""
    x, y = torch.rand(16, 1, 6, 6), torch.arange(16) % 4
    other: list[torch.Tensor] = []

    def update(batch, exchange=ALONE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

        def loss(m, x, x_adv, y):
            return nn.functional.cross_entropy(m(x_adv), y)

        given = {"shape": (1, 6, 6), "device": torch.device("cpu"), "half": False, "compiled": False}
        if kind == "plain":
            return model, PlainUpdate(model, optimizer, loss, exchange=exchange)
        return model, FastUpdate(model, optimizer, loss, batch=batch, after=lambda: None, exchange=exchange, **given)

    def meet(tensors):
        for mine, theirs in zip(tensors, other, strict=True):
            mine.add_(theirs).div_(2)

    whole, step = update(16)
    step(x, x, y, 0.1)
    _, step = update(8, Counting(lambda tensors: other.extend(tensor.clone() for tensor in tensors)))
    step(x[8:], x[8:], y[8:], 0.1)
    half, step = update(8, Counting(meet))
    step(x[:8], x[:8], y[:8], 0.1)
    for one, both in zip(half.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, both)
    before = [parameter.detach().clone() for parameter in half.parameters()]
    other[0].fill_(float("nan"))
    step(x[:8], x[:8], y[:8], 0.1)
    assert step.failed() and all(torch.equal(a, b) for a, b in zip(before, half.parameters(), strict=True))


def test_after_hook_runs_after_every_update():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).double()
    done = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    given = {"batch": 8, "shape": (1, 6, 6), "device": torch.device("cpu"), "half": False, "compiled": False}
    fast = FastUpdate(
        model,
        optimizer,
        lambda m, x, x_adv, y: nn.functional.cross_entropy(m(x), y),
        after=lambda: done.append(1),
        **given,
    )
    fast.x, fast.x_adv = fast.x.double(), fast.x_adv.double()
    x, y = torch.rand(8, 1, 6, 6, dtype=torch.float64), torch.arange(8) % 4
    fast(x, x, y, 0.1)
    fast(x[:3], x[:3], y[:3], 0.1)
    assert len(done) == 2


def test_loaded_momentum_is_laid_out_like_its_parameter():
    """A checkpoint's momentum is contiguous, the weights are channels_last; the fused kernel reads memory in order."""

    def made():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(m, x, x_adv, y):
        return nn.functional.cross_entropy(m(x), y)

    (plain_model, plain), (fast_model, fast) = made(), made()
    generator = torch.Generator().manual_seed(0)
    for one, other in zip(plain_model.parameters(), fast_model.parameters(), strict=True):
        momentum = torch.randn(one.shape, generator=generator)
        plain.state[one]["momentum_buffer"], fast.state[other]["momentum_buffer"] = momentum.clone(), momentum.clone()
    fast_model.to(memory_format=torch.channels_last)
    given = {"batch": 8, "shape": (3, 6, 6), "device": torch.device("cpu"), "half": False, "compiled": False}
    x, y = torch.rand(8, 3, 6, 6, generator=generator), torch.arange(8) % 4
    PlainUpdate(plain_model, plain, loss)(x, x, y, 0.1)
    FastUpdate(fast_model, fast, loss, after=lambda: None, **given)(x, x, y, 0.1)
    for one, other in zip(plain_model.parameters(), fast_model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_sgd_without_momentum():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    before = model[1].bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    given = {"batch": 8, "shape": (1, 6, 6), "device": torch.device("cpu"), "half": False, "compiled": False}
    fast = FastUpdate(model, optimizer, lambda m, x, x_adv, y: m(x)[:, 0].mean(), after=lambda: None, **given)
    fast(torch.rand(8, 1, 6, 6), torch.rand(8, 1, 6, 6), torch.zeros(8, dtype=torch.int64), 0.1)
    torch.testing.assert_close(model[1].bias, before - torch.tensor([0.1, 0, 0, 0]))


def test_awp_takes_the_gradient_at_perturbed_weights():
    """On loss = w^2 x / 2 per example the gradient at w is w x; at w + awp |w| it is (1 + awp) w x, whatever x."""
    for kind in (PlainUpdate, FastUpdate):
        model = nn.Linear(1, 1, bias=False)
        model.register_buffer("seen", torch.zeros(()))
        model.weight.data.fill_(2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)

        def loss(m, x, x_adv, y):
            m.seen.add_(1)
            return (m.weight**2 * x_adv.mean() / 2).sum()

        given = {"batch": 4, "shape": (1,), "device": torch.device("cpu"), "half": False, "compiled": False}
        rest = {} if kind is PlainUpdate else {**given, "after": lambda: None}
        update = kind(model, optimizer, loss, **rest)
        x, y = torch.full((4, 1), 3.0), torch.zeros(4, dtype=torch.int64)
        value = update(x, x, y, 0.1, 0.25)
        assert value.item() == pytest.approx((2 * 1.25) ** 2 * 3 / 2)  # the loss at the moved weights
        assert model.weight.item() == pytest.approx(2.0 - 0.1 * 1.25 * 2.0 * 3.0)  # the step begins at w
        assert model.seen == 1  # the pass for the direction is not counted
        update(x, x, y, 0.0, 0.0)
        assert model.seen == 2


@pytest.mark.parametrize("kind", [PlainUpdate, FastUpdate])
def test_awp_is_scaled_by_the_norm_of_each_layer(kind):
    """v_l = awp ||w_l|| g_l / ||g_l|| (Frobenius), layer by layer: two layers of unlike size, written out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[1].weight.mul_(3.0)
    x, y = torch.rand(4, 1, 2, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    loss = lambda m, x, x_adv, y: nn.functional.cross_entropy(m(x_adv), y)  # noqa: E731

    moved = copy.deepcopy(model)
    gradients = torch.autograd.grad(loss(moved, x, x, y), list(moved.parameters()))
    with torch.no_grad():
        for weight, g in zip(moved.parameters(), gradients, strict=True):
            if weight.dim() == 2:
                weight += 0.05 * weight.square().sum().sqrt() * g / g.square().sum().sqrt()
    there = torch.autograd.grad(loss(moved, x, x, y), list(moved.parameters()))
    expected = [w - 0.1 * g for w, g in zip(model.parameters(), there, strict=True)]

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    given = {"batch": 4, "shape": (1, 2, 3), "device": torch.device("cpu"), "half": False, "compiled": False}
    rest = {} if kind is PlainUpdate else {**given, "after": lambda: None}
    update = kind(model, optimizer, loss, **rest)
    if kind is FastUpdate:
        update.x_adv = update.x_adv.double()
    update(x, x, y, 0.1, 0.05)
    for weight, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.detach(), value)


def test_awp_does_not_perturb_vectors():
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    biases = []

    def loss(m, x, x_adv, y):
        biases.append(m.bias.detach().clone())
        return m(x_adv).square().sum()

    x, y = torch.rand(3, 2), torch.zeros(3, dtype=torch.int64)
    PlainUpdate(model, optimizer, loss)(x, x, y, 0.0, 0.1)
    assert all(torch.equal(bias, before["bias"]) for bias in biases) and len(biases) == 2
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.parametrize("mode", [True, False])
def test_rehearsal_captures_train_mode_and_leaves_no_trace(mode, monkeypatch):
    monkeypatch.setattr("sparring.engine.update.step.Captured", Warm)
    (plain_model, plain), (model, fast) = pair("madry")
    model.train(mode)
    before = copy.deepcopy(model.state_dict())
    fast.rehearse()
    assert model.training == mode and all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    (graph,) = fast.graphs.values()
    x, y = images(model.eval(), 16)
    for one in (model, plain_model):
        one.train()
    torch.testing.assert_close(plain(x, x, y, 0.05).float(), fast(x, x, y, 0.05).float(), rtol=1e-6, atol=1e-7)
    assert list(fast.graphs.values()) == [graph]
    model.eval()
    fast(x, x, y, 0.05)  # the capture is of train mode
    assert graph not in fast.graphs.values()


def test_uncapturable_step_runs_uncaptured(monkeypatch):
    class Refuses(Warm):
        def __init__(self, work, pool):
            super().__init__(work, pool)
            if pool is not None:
                raise NotCapturable("it makes the host wait")

    monkeypatch.setattr("sparring.engine.update.step.Captured", Refuses)
    (plain_model, plain), (model, fast) = pair("madry")
    fast.pool = "pool"
    x, y = images(model.eval(), 16)
    model.train(), plain_model.train()
    for awp in (0.0, 0.0, 0.01):
        one, other = plain(x, x, y, 0.05, awp), fast(x, x, y, 0.05, awp)
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-6, atol=1e-7)
    assert fast.not_captured == "it makes the host wait" and fast.pool is None


@pytest.mark.parametrize("name", ["fat", "trades", "mart"])
def test_soft_targets_beside_class_numbers(name):
    """One-hot targets take the step of class numbers; smoothed ones that of the plain engine, at their own graph."""
    (plain_model, plain), (fast_model, fast) = pair(name)
    x, y = images(plain_model.eval(), 26)
    plain_model.train()
    for smoothing, target in [(0.0, False), (0.0, True), (0.2, True), (0.2, True)]:
        for rows in (slice(0, 16), slice(16, 26)):
            soft = soft_targets(y[rows], 4, smoothing=smoothing)
            given = x[rows], (x[rows] + 0.01).clamp(0, 1)
            one = plain(*given, soft if smoothing else y[rows], 0.05)
            torch.testing.assert_close(
                one.float(), fast(*given, soft if target else y[rows], 0.05), rtol=1e-5, atol=1e-6
            )
    assert {kind for _, _, kind in fast.graphs} == {0, 4}
    for a, b in zip(plain_model.state_dict().values(), fast_model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
