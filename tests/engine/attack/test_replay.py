"""A replayed network returns the logits and gradients of the network, also for interleaved calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.engine.attack import replay
from sparring.engine.attack.replay import SIZES, Replayed

PIXELS, CLASSES = (2, 2, 2), 3


class Double:
    """ManualChain of a network of one product and one square, in plain operations; records the sizes of its calls."""

    def __init__(self, weight):
        self.weight, self.sizes, self.fixed, self.most = weight, [], {}, 100

    def takes(self, x, images=0):
        return x.dtype == torch.float32 and (images or len(x)) <= self.most

    def place(self, name, value):
        """Write into the same memory at every call, as a captured graph does."""
        return self.fixed.setdefault((name, value.shape), torch.empty_like(value)).copy_(value)

    def forward(self, x, rows):
        self.sizes.append(len(x))
        h = self.place("h", x[rows].flatten(1) @ self.weight)
        return self.place("logits", h.square()), [h]

    def back(self, output_gradient, values):
        return 2 * values[0] * output_gradient

    def to_pixels(self, gradient):
        return self.place("pixels", (gradient @ self.weight.T).reshape(-1, *PIXELS))


class Network(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.manual, self.seen = weight, Double(weight), []

    def forward(self, x):
        self.seen.append(len(x))
        return (x.flatten(1) @ self.weight.to(x.dtype)).square()


@pytest.fixture
def network():
    return Network(torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(0)))


def images(count, seed):
    return torch.rand(count, *PIXELS, generator=torch.Generator().manual_seed(seed))


def test_frequent_sizes_are_replayed_exactly(network):
    replayed = Replayed(network, sizes=(2, 4, 8))
    for seed, count in enumerate([3, 4, 3, 3, 4, 1, 8, 3, 2]):
        ours, theirs = (images(count, seed).requires_grad_() for _ in range(2))
        logits, expected = replayed(ours), network(theirs)
        assert torch.allclose(logits, expected)
        output_gradient = torch.randn(count, CLASSES, generator=torch.Generator().manual_seed(seed))
        gradient, wanted = (
            torch.autograd.grad(out, x, output_gradient)[0] for out, x in ((logits, ours), (expected, theirs))
        )
        assert torch.allclose(gradient, wanted, atol=1e-6)
    assert set(replayed.made) == {(4, *PIXELS)}  # 2 and 8 are too rare
    assert set(network.manual.sizes) == {4}
    assert set(network.seen) <= {1, 2, 3, 4, 8}


def test_batches_are_padded_before_a_capture_too(network):
    Replayed(network, sizes=(4,))(images(3, 0))
    assert network.seen == [4]  # so that a capture changes no bit of the result


def test_only_recent_captures_are_kept(network):
    replayed = Replayed(network, sizes=tuple(range(1, 9)))
    for count in (1, 2, 3, 4, 1, 5, 6):
        for seed in range(3):
            x = images(count, seed)
            assert torch.allclose(replayed(x), network(x))
    assert [shape[0] for shape in replayed.made] == [4, 1, 5, 6]  # the most recently used


def test_alternating_sizes_are_not_captured_at_every_call(network, monkeypatch):
    original, captures = replay._Pair, []
    monkeypatch.setattr(replay, "_Pair", lambda *given: captures.append(given[1][0]) or original(*given))
    replayed = Replayed(network, sizes=tuple(range(1, 9)))
    for _ in range(20):
        for count in (1, 2, 3, 4, 5):
            replayed(images(count, 0))
    assert len(captures) <= 100 / 3  # every new capture needs three calls again


def test_padded_batch_must_fit_too(network):
    """Seven images fit, the eight that they are padded to do not."""
    network.manual.most = 7
    replayed = Replayed(network, sizes=(4, 8))
    for _ in range(4):
        replayed(images(7, 0))
    assert not replayed.made and network.seen == [7] * 4


def test_out_of_memory_falls_back_to_the_network(network, monkeypatch):
    def none(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(replay, "_Pair", none)
    replayed = Replayed(network, sizes=(4,))
    for seed in range(6):
        assert torch.allclose(replayed(images(3, seed)), network(images(3, seed)))
    assert not replayed.made


def test_forget_drops_captures(network):
    replayed = Replayed(network, sizes=(4,))
    for seed in range(3):
        replayed(images(4, seed))
    assert replayed.made
    replayed.forget()
    assert not replayed.made
    for seed in range(3):
        assert not replayed.made and torch.allclose(replayed(images(4, seed)), network(images(4, seed)))
    assert replayed.made


def test_gradients_are_not_overwritten(network):
    replayed = Replayed(network, sizes=(4,))
    for seed in range(3):
        replayed(images(4, seed))
    points = [images(4, seed).requires_grad_() for seed in (10, 11)]
    ours = [torch.autograd.grad(replayed(point).sum(), point)[0] for point in points]
    theirs = [torch.autograd.grad(network(point).sum(), point)[0] for point in points]
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(ours, theirs, strict=True))


def test_interleaved_calls_are_independent(network):
    replayed = Replayed(network, sizes=(4,))
    for seed in range(3):
        replayed(images(4, seed))
    first, second = images(4, 10).requires_grad_(), images(3, 11)
    logits = replayed(first)
    kept = logits.detach().clone()
    replayed(second)
    assert torch.equal(logits, kept)  # logits are not overwritten
    (gradient,) = torch.autograd.grad(logits.sum(), first)
    (wanted,) = torch.autograd.grad(network(first).sum(), first)
    assert torch.allclose(gradient, wanted, atol=1e-6)


def test_unsupported_inputs_go_to_the_network(network):
    replayed = Replayed(network, sizes=(4,))
    for x in (images(5, 0), images(2, 0).double(), images(0, 0)):
        for _ in range(4):
            assert torch.allclose(replayed(x), network(x))
    assert not replayed.made and len(network.seen) == 2 * 3 * 4
    network.manual = None
    assert torch.allclose(replayed(images(2, 0)), network(images(2, 0)))


def test_sizes_waste_little():
    for count in range(33, SIZES[-1] + 1):
        size = next(size for size in SIZES if size >= count)
        assert size <= count + 63 and size / count < 2
