"""The kernels in eight bits compute what torch computes on the same rounded numbers (Triton's interpreter, on a CPU).

The interpreter rounds to eight bits otherwise than a GPU does, so results are compared where they need no rounding:
inputs are small whole numbers. benchmarks/check_fp8.py compares the rounded ones on a GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_fp8.py", allow_module_level=True)

from sparring.engine.manual import fp8_simulated
from sparring.engine.triton import fp8_conv, tuning
from sparring.engine.triton.tuning import Fp8Cut

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
CUTS = {
    "places": Fp8Cut("places", 32, 32, 0, 32),
    "channels": Fp8Cut("channels", 16, 64, 32, 32),
    "mixed, a tail": Fp8Cut("mixed", 64, 64, 32, 64, tail=32),
    "wide": Fp8Cut("channels", 256, 128, 0, 32),
}


@pytest.fixture
def unrounded(monkeypatch):
    """Torch's functions return the numbers before they are rounded to eight bits."""
    monkeypatch.setattr(fp8_simulated, "to", lambda value, dtype: value)


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch, unrounded):
    monkeypatch.setattr(fp8_conv, "cut_of", lambda x, outer, places: CUTS[request.param])
    return CUTS[request.param]


class Draw:
    """Small whole numbers, most of them 0."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, least=0, most=3, share=0.3, dtype=E4M3):
        numbers = torch.randint(least, most + 1, shape, generator=self.generator).float()
        return (numbers * (torch.rand(shape, generator=self.generator) < share)).to(dtype)


def equal(found, expected):
    """Whether the numbers are the same, where they need no rounding."""
    exact = expected.to(found.dtype).float() == expected.float()
    assert exact.float().mean() > 0.7 and expected[exact].float().any()
    assert torch.equal(found.float()[exact], expected.float()[exact])


def same(function, *given, **more):
    """Whether the kernel and torch return the same."""
    found, expected = (getattr(module, function)(*given, **more) for module in (fp8_conv, fp8_simulated))
    found, expected = ((each,) if isinstance(each, torch.Tensor) else each for each in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            equal(one, other)


NUMBERS = torch.tensor([0.5, 2.0, 0.5])


def test_forward(cut):
    draw, images, side = Draw(), 3, 4
    inner, outer = cut.inner + cut.tail, cut.one + cut.two
    x, weight = draw(images, side, side, inner), draw(outer, 9 * inner, least=-1, most=1, share=0.02)
    scale, shift = draw(outer, least=-2, most=2, share=1, dtype=BF16), draw(outer, least=-2, dtype=BF16)
    for stride in (1, 2):
        same("conv_relu", x, weight, NUMBERS, shift, stride=stride)
    added = draw(images, side, side, outer, least=-3, dtype=BF16)
    same("conv_sum", x, weight, NUMBERS, scale, shift, added=added, kept=True, dtype=E4M3)
    same("conv_sum", x, weight, NUMBERS, scale, shift, kept=False, dtype=BF16)
    same("conv_sum_relu", x, weight, NUMBERS, shift, added=added, kept=True, dtype=E4M3)
    same("conv_sum_relu", x, weight, NUMBERS, shift, kept=False, dtype=BF16)
    short = draw(images, 2 * side, 2 * side, 64)
    weight = torch.cat([weight.float(), draw(outer, 64, least=-1, most=1, share=0.05).float()], 1).to(E4M3)
    same("conv_sum", x, weight, NUMBERS, scale, shift, shortcut=short, kept=True, dtype=E4M3)
    same("conv_sum_relu", x, weight, NUMBERS, shift, shortcut=short, kept=True, dtype=E4M3)


@pytest.mark.parametrize("among", [None, torch.tensor([4, 0, 2], dtype=torch.int32)])
def test_back(cut, among):
    draw, images, side = Draw(1), 3, 4
    inner, outer = cut.inner + cut.tail, cut.one + cut.two
    g = draw(images, side, side, inner, least=-2, most=2, dtype=E5M2)
    weight = draw(outer, 9 * inner, least=-1, most=1, share=0.02)
    scale = draw(outer, least=-2, most=2, share=1, dtype=BF16)
    forward = 5 if among is not None else images
    seen, added = draw(forward, side, side, outer, share=0.5), draw(images, side, side, outer, least=-3, dtype=BF16)
    for dtype in (E5M2, BF16):
        same("conv_back_relu", g, weight, NUMBERS, seen, among=among, dtype=dtype)
    same("conv_back_sum", g, weight, NUMBERS, seen, scale, among=among, stride=1, added=added)
    same("conv_back_sum_relu", g, weight, NUMBERS, seen, among=among, stride=1, added=added)
    seen = draw(forward, 2 * side, 2 * side, outer, share=0.5)
    weight = torch.cat([weight.float(), draw(outer, 32, least=-1, most=1, share=0.05).float()], 1).to(E4M3)
    short = draw(images, side, side, 32, least=-2, most=2, dtype=E5M2)
    same("conv_back_sum", g, weight, NUMBERS, seen, scale, among=among, stride=2, shortcut=short)
    same("conv_back_sum_relu", g, weight, NUMBERS, seen, among=among, stride=2, shortcut=short)


def test_too_large_a_number_becomes_the_largest():
    x, weight = torch.full((1, 2, 2, 32), 448.0).to(E4M3), torch.full((32, 288), 448.0).to(E4M3)
    numbers, none = torch.ones(3), torch.zeros(32, dtype=BF16)
    assert (fp8_conv.conv_relu(x, weight, numbers, none, stride=1).float() == 448).all()
    g = x.to(E5M2)
    assert (fp8_conv.conv_back_relu(g, weight, numbers, x, among=None, dtype=E5M2).float() == 57344).all()


def test_weights_for_both_passes(unrounded):
    weight = torch.randint(-9, 9, (40, 9, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
    found = [torch.zeros(40, 300).to(E4M3), torch.zeros(32, 400).to(E4M3)]
    expected = [torch.zeros(40, 300), torch.zeros(32, 400)]
    for module, (ahead, back) in ((fp8_conv, found), (fp8_simulated, expected)):
        module.round_weights(weight, ahead[:, :288], back[:, :360], torch.tensor([0, 0, 0, 1.0, 2.0]))
    for one, other in zip(found, expected, strict=True):
        equal(one, other)


@pytest.mark.parametrize("among", [None, torch.tensor([3, 1], dtype=torch.int32)])
def test_the_first_gradient(among, unrounded):
    """Images whose gradient is large, tiny and zero."""
    draw = torch.Generator().manual_seed(0)
    gradient = torch.randn(5, 10, generator=draw) * torch.tensor([1e3, 1.0, 1e-20, 0.0, 1e-3])[:, None]
    weight, o, scale = (torch.randn(shape, generator=draw).bfloat16() for shape in ((10, 96), (5, 4, 4, 96), (96,)))
    given = (gradient, weight, o.relu(), scale)
    found, expected = (module.first_back(*given, among=among) for module in (fp8_conv, fp8_simulated))
    torch.testing.assert_close(found[0], expected[0], rtol=2**-6, atol=1e-6)
    assert (found[1].float() - expected[1]).norm() < 0.2 * expected[1].norm()
    torch.testing.assert_close(found[2], expected[2])
    assert not found[0][0 if among is not None else 3].any()
    largest = found[0].float().div(scale.float()).abs().amax((1, 2, 3))
    assert ((largest > 0.9) | (largest == 0)).all() and (largest < 1.1).all()


def test_rounding():
    x = torch.tensor([0.5, -3.0, 1e6, 0.0]).bfloat16()
    assert fp8_conv.rounded(x, NUMBERS).float().tolist() == [1, -6, 448, 0]


def test_every_cut_fits_its_convolution():
    """A program takes whole lines, and the channels of a round divide those of a tap."""
    for (outer, inner), rows in tuning.TUNED["NVIDIA H200"].fp8.items():
        assert rows[-1][0] == 0 and [least for least, _ in rows] == sorted((least for least, _ in rows), reverse=True)
        for _, each in rows:
            assert (inner - each.tail) % each.inner == 0 and each.places % 64 == 0
            assert outer <= each.one + each.two or outer % (each.one + each.two) == 0 or each.two == 0
    x = torch.empty(1, 8, 8, 96, dtype=E4M3)
    assert fp8_conv.cut_of(x, 96, 64).inner == 32
