"""Weights and activations of residual blocks in eight bits: their units, and the weights rounded for both passes.

- Activations are e4m3 in units of the tensor's bound, |bias| + 256 |weight| of its batch-norm; what lies beyond becomes
  the largest number. e4m3 spans 2^15, so the bound may be as wide, for running statistics that are not right yet (16
  to 1024 give the same gradients). It follows from the parameters: there is nothing to record or resume.
- Weights are e4m3, the largest of a tensor 448.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparring.engine.folded_layers import ConvUnit

LARGEST = 448.0  # of e4m3
_BOUND = 256.0  # activations of a channel, in its batch-norm's weight


class Bounds:
    """The largest activation that each of some batch-norms is taken to write."""

    def __init__(self, norms: Sequence[nn.BatchNorm2d], device: torch.device) -> None:
        self.norms = norms
        start, widest = 0, max(norm.num_features for norm in norms)
        rows = torch.full((len(norms), widest), sum(norm.num_features for norm in norms))  # behind the last: a zero
        for row, norm in zip(rows, norms, strict=True):
            row[: norm.num_features] = torch.arange(start, start + norm.num_features)
            start += norm.num_features
        self.places = rows.to(device)

    def __call__(self) -> Tensor:
        """One number for each, in fp32."""
        bound = torch.cat([norm.bias for norm in self.norms]).abs()
        bound = bound + _BOUND * torch.cat([norm.weight for norm in self.norms]).abs()
        return torch.cat([bound, bound.new_zeros(1)])[self.places].amax(1).clamp(min=1e-20)


class Rounded(NamedTuple):
    """A convolution's weights in eight bits, and the numbers that its kernels read (fp8_kernels.write)."""

    unit: ConvUnit
    ahead: Tensor  # (outer, 9 * inner [+ inner of the shortcut])
    back: Tensor  # (inner, 9 * outer [+ outer of the shortcut])
    numbers: Tensor


class RoundedBlocks:
    """The convolutions of residual blocks: two 3x3 ones each, and a 1x1 shortcut or none.

    Number 2 i and 2 i + 1 are those of block i. A shortcut's weights are further columns of the second one's forward
    and of the first one's backward.
    """

    def __init__(
        self, blocks: Sequence[tuple[ConvUnit | None, ConvUnit, ConvUnit | None]], ops: ModuleType, device: torch.device
    ) -> None:
        """`blocks`: both convolutions and the shortcut; the very first may be missing. `ops`: see fp8_simulated."""
        self.ops, self.blocks = ops, blocks
        self.shorts = [place for place, (_, _, short) in enumerate(blocks) if short is not None]
        self.numbers = torch.zeros(2 * len(blocks) + len(self.shorts), 8, device=device)
        self.ones: list[Rounded | None] = []
        self.twos: list[Rounded] = []
        for place, (one, two, short) in enumerate(blocks):
            inner, outer = (0, 0) if short is None else (short.weight.shape[1], short.weight.shape[0])
            self.ones.append(None if one is None else self._rounded(2 * place, one, back=outer))
            self.twos.append(self._rounded(2 * place + 1, two, ahead=inner))
        self.of_one = torch.tensor([2 * place for place in self.shorts], dtype=torch.int64, device=device)
        beside = torch.full((2, 2 * len(blocks)), len(self.shorts))  # behind the last shortcut: a zero
        for row, place in enumerate(self.shorts):
            beside[0, 2 * place + 1] = beside[1, 2 * place] = row
        self.beside_two, self.beside_one = beside.to(device)

    def _rounded(self, number: int, unit: ConvUnit, *, ahead: int = 0, back: int = 0) -> Rounded:
        outer, inner = unit.weight.shape[:2]
        shapes = (outer, 9 * inner + ahead), (inner, 9 * outer + back)
        rows = [torch.zeros(shape, device=unit.weight.device).to(torch.float8_e4m3fn) for shape in shapes]
        return Rounded(unit, rows[0], rows[1], self.numbers[number])

    @property
    def widest(self) -> int:
        """The most channels of a convolution's result."""
        return max(len(conv.ahead) for conv in self.twos)

    def refresh(self, unit: Tensor) -> None:
        """Round the folded layers' weights again. `unit`: of what each convolution reads, in their order."""
        one = unit.new_ones(1)
        unit = torch.cat([unit, one])  # behind the last comes the pooling, in bf16
        convs = [conv for pair in zip(self.ones, self.twos, strict=True) for conv in pair if conv is not None]
        shorts = [short for _, _, short in self.blocks if short is not None]
        read = [conv.unit.weight for conv in convs] + [short.weight for short in shorts]
        most = torch.stack(torch._foreach_norm(read, float("inf"))).float().clamp(min=1e-20) / LARGEST
        own, short = most[: len(convs)], most[len(convs) :]
        if self.ones[0] is None:
            own = torch.cat([one, own])
        # A shortcut shares the sum, and so the unit, of the second convolution forward and of the first one back.
        of_one, of_two, zero = self.of_one, self.of_one + 1, own.new_zeros(1)
        ratio = unit[of_one] / unit[of_two]
        ahead = torch.maximum(own, torch.cat([short * ratio, zero])[self.beside_two])
        back = torch.maximum(own, torch.cat([short, zero])[self.beside_one])
        main = torch.stack([unit[:-1] * ahead, 1 / unit[1:], back, 1 / ahead, 1 / back])
        count = 2 * len(self.blocks)
        self.numbers[:count, :5] = main.T
        self.numbers[count:, 3:5] = torch.stack([ratio / ahead[of_two], 1 / back[of_one]]).T
        for conv in convs:
            outer, inner = conv.unit.weight.shape[:2]
            self._round(conv.unit, conv.ahead[:, : 9 * inner], conv.back[:, : 9 * outer], conv.numbers)
        for row, (place, layer) in enumerate(zip(self.shorts, shorts, strict=True), start=count):
            first, second = self.ones[place], self.twos[place]
            assert first is not None
            columns = 9 * len(second.ahead)
            self._round(layer, second.ahead[:, columns:], first.back[:, columns:], self.numbers[row])

    def _round(self, unit: ConvUnit, ahead: Tensor, back: Tensor, numbers: Tensor) -> None:
        weight = unit.weight.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        self.ops.round_weights(weight, ahead, back, numbers)


def rows(x: Tensor) -> Tensor:
    """(images, lines, columns, channels) of a tensor that is channels last."""
    return x.permute(0, 2, 3, 1).contiguous()


def planes(x: Tensor) -> Tensor:
    """The way back, without a copy."""
    return x.permute(0, 3, 1, 2)


def fits(x: Tensor, images: int, *, halved: int, widest: int) -> bool:
    """Whether the kernels can read such images: of 4 to 64 pixels a side, powers of 2, after being `halved` of 2."""
    sides = all(side in (4, 8, 16, 32, 64) and side >= 2 * halved for side in x.shape[2:])
    return sides and max(images, len(x)) * x.shape[2] * x.shape[3] * widest < 2**31
