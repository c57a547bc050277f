"""A step in two halves: all examples are checked, and only those that go on get a gradient. By Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_engine.py", allow_module_level=True)

from sparring.engine.attack.active_set import ActiveSet
from sparring.engine.attack.buckets import fitting
from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.manual import fused_ops
from sparring.engine.triton import attack_step, conv, pointwise, pooling
from sparring.engine.triton.conv import Tiling
from sparring.models import build
from sparring.objectives import KTauPGD
from tests.engine.networks import OneBlock
from tests.engine.streams import Warm

CPU = torch.device("cpu")
AMONG = torch.tensor([4, 1, 1], dtype=torch.int32)
SHAPE, PIXELS, CLASSES, HIDDEN = (1, 3, 4), 12, 3, 16


def image(draw, *shape, dtype=torch.float16):
    return torch.randn(shape, generator=draw).to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("two", [False, True])
def test_relu_backward_of_fewer_images(two):
    draw = torch.Generator().manual_seed(0)
    y, first, second = (image(draw, images, 3, 40, 9) for images in (5, 3, 3))
    ours = pointwise.relu_back(first, second if two else None, y, AMONG)
    assert torch.equal(ours, torch.where(y[AMONG] > 0, first + second if two else first, 0.0))
    assert ours.stride() == first.stride()


@pytest.mark.parametrize("masked", [False, True])
def test_pooling_backward_of_fewer_images(masked, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    h, weight, output_gradient = image(draw, 5, 20, 3, 3, dtype=torch.bfloat16), torch.randn(7, 20), torch.randn(5, 7)
    whole = pooling.pool_dense_back(output_gradient[AMONG], weight, h[AMONG], masked=masked)
    assert torch.equal(pooling.pool_dense_back(output_gradient, weight, h, masked=masked, among=AMONG), whole)
    plain = fused_ops.pool_back(output_gradient, weight, h, masked=masked, among=AMONG)
    assert torch.allclose(plain.float(), whole.float(), rtol=2**-6) and plain.shape == whole.shape


def test_maxima_backward_of_fewer_images():
    draw = torch.Generator().manual_seed(0)
    y, g = image(draw, 5, 3, 6, 4), image(draw, 3, 3, 3, 2)
    assert torch.equal(pooling.max_pool_back(g, y, AMONG), pooling.max_pool_back(g, y[AMONG]))


@pytest.mark.parametrize(("stride", "split"), [(1, 3), (2, 1)])
def test_convolution_backward_of_fewer_images(stride, split):
    draw = torch.Generator().manual_seed(0)
    g, weight = image(draw, 3, 64, 8 // stride, 8 // stride), image(draw, 64, 64, 3, 3) / 16
    y, z = image(draw, 5, 64, 8, 8), image(draw, 3, 64, 8, 8)
    how = {"stride": stride, "arrived": torch.zeros(256, dtype=torch.int32), "cut": Tiling(32, 64, 32, split), "z": z}
    whole = conv.conv_back(g, weight, y=y[AMONG].contiguous(memory_format=torch.channels_last), **how)
    assert torch.equal(conv.conv_back(g, weight, y=y, among=AMONG, **how), whole)
    assert whole.any() and not whole.all()


def test_cudnn_backward_of_fewer_images():
    draw = torch.Generator().manual_seed(0)
    g, weight, other = (
        image(draw, *shape, dtype=torch.float32) for shape in ((3, 8, 6, 6), (8, 4, 3, 3), (3, 4, 6, 6))
    )
    y = image(draw, 5, 4, 6, 6, dtype=torch.float32)
    for more in (None, other):
        whole = fused_ops.back_to(y[AMONG], g, weight, (1, 1), (1, 1), more)
        assert torch.equal(fused_ops.back_to(y, g, weight, (1, 1), (1, 1), more, AMONG), whole)


@pytest.mark.parametrize(("name", "cudnn"), [("small_cnn", False), ("one block", True)])
def test_network_backward_of_fewer_images(folded, name, cudnn, monkeypatch):
    monkeypatch.setattr(conv, "cudnn_is_faster", lambda *given, **more: cudnn)
    ours, _ = folded(OneBlock() if name == "one block" else build("small_cnn", num_classes=10, size=(8, 8)))
    draw = torch.Generator().manual_seed(0)
    x, output_gradient = torch.rand(3, 3, 8, 8, generator=draw), torch.randn(3, 10, generator=draw)
    _, values = ours.manual.forward(x, torch.arange(3))
    among = torch.tensor([2, 0], dtype=torch.int32)
    some, whole = ours.manual.back(output_gradient, values, among), ours.manual.back(output_gradient, values)[among]
    assert some.shape == whole.shape and whole.any()
    assert torch.allclose(some, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))


def test_two_halves_are_a_step(folded):
    ours, _ = folded(OneBlock())
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(5, 3, 8, 8, generator=draw)
    y = ours(x).argmax(dim=1)
    y[::2] = (y[::2] + 1) % 10  # wrong from the start
    sets = []
    for halves in (False, True):
        active = ActiveSet(
            6, (3, 8, 8), 10, steps=3, inner="ce", noise=False, project=True, device=CPU, kernels=attack_step
        )
        active.begin(x, y, x, tau=0, eps=0.1, step_size=0.03)
        if halves:
            active.check(ours.manual)
            assert active.slots.tolist() == [1, 3, 0, 0, 0, 0, 0]
            active.go(ours.manual, 4)
        else:
            active.step(ours, 6)
        sets.append(active)
    whole, parts = sets
    for name in ("backprops", "rows", "report", "serial", "tau_left", "slots"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    assert torch.equal(whole.x_adv, parts.x_adv) and torch.equal(parts.x_adv[::2][:3], x[::2])
    assert not torch.equal(parts.x_adv[1], x[1])


class OneHidden:
    """A network of one hidden layer, both ways, in torch."""

    def __init__(self, seed):
        draw = torch.Generator().manual_seed(seed)
        self.inner = torch.randn(HIDDEN, PIXELS, generator=draw)
        self.outer = torch.randn(CLASSES, HIDDEN, generator=draw)
        self.manual = self
        self.halved = []  # (images checked, images with a gradient)

    def __call__(self, x):
        return torch.relu(x.flatten(1) @ self.inner.T - 0.5) @ self.outer.T

    def takes(self, x, images=0):
        return x.shape[1:] == SHAPE

    def forward(self, x, rows):
        hidden = torch.relu(x[rows].flatten(1) @ self.inner.T - 0.5)
        return hidden @ self.outer.T, [hidden]

    def back(self, output_gradient, values, among=None, *, sized=True):
        (hidden,) = values
        if among is not None:
            self.halved.append((len(output_gradient), len(among)))
            output_gradient, hidden = output_gradient[among], hidden[among]
        gradient = (output_gradient @ self.outer * (hidden > 0)) @ self.inner
        return gradient if sized else gradient * torch.arange(1, len(gradient) + 1)[:, None]

    def to_pixels(self, gradient):
        return gradient.reshape(-1, *SHAPE)

    def move(self, gradient, x_adv, x, target, kicks, numbers, step_index, *, project):
        attack_step.move(x_adv, x, kicks, gradient, target, numbers, step_index, project=project)

    def refresh(self):
        pass

    def compile_for(self, sizes, shape):
        pass


# The same examples every time: where "kl" meets a saturated softmax, a gradient within rounding of 0 takes either side.
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 9),
    tau=st.integers(0, 5),
    every=st.integers(1, 5),
    loss=st.sampled_from(["ce", "kl"]),
)
def test_a_whole_attack_in_halves(seed, count, tau, every, loss):
    network = OneHidden(seed)
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *SHAPE, generator=draw)
    y = network(x).argmax(dim=1)
    y[::3] = (y[::3] + 1) % CLASSES
    attack = CapturedAttack(network, 9, SHAPE, CLASSES, device=CPU, every=every, kernels=attack_step)
    pgd = KTauPGD(eps=0.2, step_size=0.04, steps=5, tau=tau, loss=loss, start="uniform", noise=0.01)
    for again in range(2):
        network.halved.clear()
        ours = attack(pgd, x, y, torch.Generator().manual_seed(again))
        plain = pgd(network, x, y, torch.Generator().manual_seed(again))
        assert torch.equal(ours.backprops, plain.backprops)
        # A gradient within rounding of 0 may have either sign: of a few pixels at most.
        assert ((ours.x_adv - plain.x_adv).abs() > 1e-6).float().mean() <= 0.1
        went_on = int((plain.backprops > tau).sum())
        halved = tau < 5 and fitting(attack.sizes, count) == 9 and went_on > 0
        assert network.halved == ([(9, fitting(attack.sizes, went_on))] if halved else [])


def test_halves_are_captured_once_examples_may_stop(monkeypatch):
    """Plain PGD, which is tau >= K, does without them; they may come later, and change no attack."""
    monkeypatch.setattr("sparring.engine.attack.runner.Captured", Warm)
    network = OneHidden(3)
    draw = torch.Generator().manual_seed(3)
    x = torch.rand(9, *SHAPE, generator=draw)
    y = network(x).argmax(dim=1)
    attack = CapturedAttack(network, 9, SHAPE, CLASSES, device=CPU, every=3, kernels=attack_step)
    checks = []
    for tau, halved in ((4, False), (5, False), (1, True), (4, True), (0, True)):
        pgd = KTauPGD(eps=0.2, step_size=0.04, steps=4, tau=tau, loss="ce", start=None)
        ours, plain = attack(pgd, x, y, torch.Generator()), pgd(network, x, y, torch.Generator())
        assert torch.equal(ours.backprops, plain.backprops) and torch.allclose(ours.x_adv, plain.x_adv, atol=1e-6)
        (made,) = attack.made.values()
        assert (made.check is not None) == halved == bool(made.go)
        assert made.taken == int(made.active.serial)  # warm-ups were steps, too
        checks.append(made.check)
    assert checks[2] is checks[3] is checks[4]  # made once


def test_only_images_that_it_takes_go_to_the_hand_written_network():
    network = OneHidden(0)
    how = {"steps": 2, "inner": "ce", "noise": False, "project": True, "device": CPU}
    assert ActiveSet(2, SHAPE, CLASSES, kernels=attack_step, **how).manual(network) is network
    assert ActiveSet(2, (1, 3, 3), CLASSES, kernels=attack_step, **how).manual(network) is None
    assert ActiveSet(2, SHAPE, CLASSES, **how).manual(network) is None  # without kernels
    assert ActiveSet(2, SHAPE, CLASSES, kernels=attack_step, **how).manual(lambda x: x) is None
