"""The batch-norm kernels equal torch's, forward and backward, run by Triton's interpreter on a CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_engine.py", allow_module_level=True)

from sparring.engine.triton import batch_norm, tuning
from sparring.engine.triton.tuning import BatchNormTuning
from sparring.engine.update import fused_layers

H200 = tuning.TUNED["NVIDIA H200"]


def image(draw, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=draw).to(dtype).contiguous(memory_format=torch.channels_last)


def layer(draw, channels, *, mean=0.0):
    made = nn.BatchNorm2d(channels, eps=1e-4, momentum=0.3)
    with torch.no_grad():
        made.weight.copy_(torch.randn(channels, generator=draw))
        made.bias.copy_(torch.randn(channels, generator=draw))
        made.running_mean.copy_(mean + torch.randn(channels, generator=draw))
        made.running_var.copy_(torch.rand(channels, generator=draw) + 0.5)
    return made


def unit(of, *, bias=None, relu=False, twice=False):
    made = fused_layers.NormUnit(of, bias, batch_norm, torch.zeros(256, dtype=torch.int32))
    made.relu, made.twice = relu, twice
    return made


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(2, 64, 6, 8), (3, 40, 2, 2), (1, 4, 5, 2), (5, 196, 8, 8), (16, 32, 1, 1)]),
    relu=st.booleans(),
    adds=st.booleans(),
    twice=st.booleans(),
    biased=st.booleans(),
    programs=st.sampled_from([1, 5, 528]),
)
def test_forward_and_backward_equal_torch(seed, shape, relu, adds, twice, biased, programs):
    draw = torch.Generator().manual_seed(seed)
    channels = shape[1]
    ours, theirs = layer(draw, channels, mean=3.0), None
    theirs = copy.deepcopy(ours).double()
    x = (image(draw, *shape) + 3).requires_grad_()
    z = image(draw, *shape).requires_grad_() if adds else None
    bias = torch.randn(channels, generator=draw).requires_grad_() if biased else None
    output_gradients = [image(draw, *shape) for _ in range(2 if twice else 1)]
    made = unit(ours, bias=bias, relu=relu, twice=twice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "of", lambda device: replace(H200, batch_norm=BatchNormTuning(programs=programs)))
        y = made(x, z)
        outs = y if twice else (y,)
        wanted = [t for t in (x, ours.weight, ours.bias, bias, z) if t is not None]
        found = torch.autograd.grad(outs, wanted, output_gradients)
    assert type(outs[0].grad_fn).__name__.startswith(("_Norm", "View")) and not made.arrived.any()

    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, bias, z)]
    read = exact[0] if bias is None else exact[0] + exact[1][:, None, None]
    expected = theirs(read) if z is None else theirs(read) + exact[2]
    # Both sides use the same ReLU mask: signs of values near 0 are rounding.
    expected = torch.where(outs[0] > 0, expected, 0.0) if relu else expected
    inputs = [t for t in (exact[0], theirs.weight, theirs.bias, exact[1], exact[2]) if t is not None]
    gradients = torch.autograd.grad(expected, inputs, sum(output_gradients).double())
    for out in outs:
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(out.double(), expected, atol=1e-4)
    if relu:
        assert (outs[0] >= 0).all()
    for one, other in zip(found, gradients, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-3 * sum(output_gradients).norm() / len(x)
    if bias is not None:
        assert not found[3].any()
    assert torch.allclose(ours.running_mean.double(), theirs.running_mean, atol=1e-5)
    assert torch.allclose(ours.running_var.double(), theirs.running_var, rtol=1e-4)


def test_large_mean_keeps_precision():
    draw = torch.Generator().manual_seed(0)
    ours = layer(draw, 32)  # its running statistics are near 0
    x = image(draw, 8, 32, 8, 8) + 1000
    expected = F.batch_norm(x.double(), None, None, ours.weight.double(), ours.bias.double(), True, eps=ours.eps)
    assert torch.allclose(unit(ours)(x).double(), expected, atol=1e-3)


def test_large_constant_channel_is_normalised():
    ours = layer(torch.Generator().manual_seed(0), 8)
    x = torch.full((4, 8, 4, 4), 1000.1).contiguous(memory_format=torch.channels_last)
    assert torch.allclose(unit(ours)(x), ours.bias[:, None, None].expand_as(x), atol=1e-2)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_half_precision_equals_torch(adds, twice):
    draw = torch.Generator().manual_seed(0)
    ours = layer(draw, 40)
    theirs = copy.deepcopy(ours)
    given = [image(draw, 4, 40, 6, 6, dtype=torch.float16).requires_grad_() for _ in range(2 if adds else 1)]
    output_gradients = [image(draw, 4, 40, 6, 6) for _ in range(2 if twice else 1)]  # in fp32, as from a loss
    made = unit(ours, relu=True, twice=twice)
    outs = made(*given) if twice else (made(*given),)
    found = torch.autograd.grad(
        outs, [*given, ours.weight, ours.bias], [output_gradient.half() for output_gradient in output_gradients]
    )
    exact = [tensor.detach().float().requires_grad_() for tensor in given]
    expected = F.relu(theirs(exact[0]) + (exact[1] if adds else 0))
    gradients = torch.autograd.grad(expected, [*exact, theirs.weight, theirs.bias], sum(output_gradients))
    assert outs[0].dtype == torch.float16 and found[0].dtype == torch.float16 and found[-1].dtype == torch.float32
    for one, other in zip((outs[0], *found), (expected, *gradients), strict=True):
        assert (one - other).norm() <= 2e-3 * other.norm()
    assert fused_layers._like(output_gradients[0], given[0]).dtype == torch.float16


@pytest.mark.parametrize("why", ["eval", "layout", "another precision", "another shape"])
def test_unsupported_inputs_use_torch(why, monkeypatch):
    monkeypatch.setattr(batch_norm, "forward", None)
    draw = torch.Generator().manual_seed(0)
    ours = layer(draw, 8)
    x, z, bias = image(draw, 4, 8, 4, 4), image(draw, 4, 8, 4, 4), torch.randn(8, generator=draw)
    if why == "eval":
        ours.eval()
    elif why == "layout":
        x = x.contiguous()
    elif why == "another precision":
        z = z.double()
    else:
        z = z[:, :, :1, :1]
    theirs = copy.deepcopy(ours)
    one, two = unit(ours, bias=bias, relu=True, twice=True)(x, z)
    assert one is two and torch.allclose(one, F.relu(theirs(x + bias[:, None, None]) + z).to(one.dtype), atol=1e-5)


def test_supported_inputs():
    def empty(*shape, layout=torch.channels_last):
        return torch.empty(shape, device="meta", memory_format=layout)

    assert (
        batch_norm.takes(empty(2, 8, 4, 4))
        and batch_norm.takes(empty(2, 8, 1, 1))
        and batch_norm.takes(empty(2, 8192, 2, 2))
    )
    assert not batch_norm.takes(empty(2, 8, 4, 4, layout=torch.contiguous_format))
    assert not batch_norm.takes(empty(2, 8193, 2, 2))  # more channels than counters
    assert not batch_norm.takes(empty(2**15, 64, 32, 32))  # 2**31 values
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # torch's own error
        unit(nn.BatchNorm2d(8))(torch.rand(1, 8, 1, 1))
