"""The hand-written wide ResNet with its convolutions in eight bits: for attacks alone, on GPUs that multiply fp8.

All convolutions but those that read the pixels or the stem have operands of eight bits and sums in fp32, in both
directions; the stem, the first convolution behind it and the linear layer are bf16. What passes from block to block,
the sum and its gradient, stays bf16 beside its rounded copy. triton/fp8_conv.py has the kernels.

- Activations are e4m3 in units of the tensor's bound, |bias| + 256 |weight| of its batch-norm; what lies beyond becomes
  the largest number. e4m3 spans 2^15, so the bound may be as wide, for running statistics that are not right yet (16
  to 1024 give the same gradients). It follows from the parameters: there is nothing to record or resume.
- Weights are e4m3, the largest of a tensor 448.
- Gradients are e5m2. An attack needs their signs only, so each image's is divided by its largest number behind the
  pooling; from there it grows or shrinks by less than 2^6 per number down to the stem, and e5m2 has room for 2^15 on
  either side. `back` returns the gradient in its true size.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparring.engine.folded_layers import ConvUnit
from sparring.engine.manual import fp8_simulated
from sparring.engine.manual.fused_ops import conv_forward, input_gradient, pool_forward, split_in_one
from sparring.engine.manual.wide_resnet import ManualWideResNet
from sparring.engine.triton.available import fp8_for

_BOUND = 256.0  # activations of a channel, in its batch-norm's weight
_LARGEST = 448.0  # of e4m3


class _Conv(NamedTuple):
    """A convolution's weights in eight bits, and the numbers that its kernels read (see fp8_conv._write)."""

    unit: ConvUnit
    ahead: Tensor  # (outer, 9 * inner [+ inner of the shortcut])
    back: Tensor  # (inner, 9 * outer [+ outer of the shortcut])
    numbers: Tensor


class Fp8WideResNet:
    """Pixels to logits, and the gradient back to the pixels."""

    def __init__(self, plain: ManualWideResNet, ops: ModuleType) -> None:
        """From the network in bf16, which `unfit` has nothing against. `ops`: fp8_conv, or fp8_simulated."""
        self.plain, self.ops, self.channels = plain, ops, plain.channels
        blocks = plain.blocks
        self.strides = [int(block.one.stride[0]) for block in blocks]
        device = plain.head.weight.device
        # The convolutions in their order are numbered: 2 i and 2 i + 1 are those of block i; then come the shortcuts.
        self.shorts = [place for place, block in enumerate(blocks) if place and block.shortcut is not None]
        self.numbers = torch.zeros(2 * len(blocks) + len(self.shorts), 8, device=device)
        self.ones: list[_Conv | None] = [None]  # the first block's is bf16
        self.twos: list[_Conv] = []
        for place, block in enumerate(blocks):
            more = block.shortcut if place in self.shorts else None
            if place:
                self.ones.append(self._conv(2 * place, block.one, back=0 if more is None else more.weight.shape[0]))
            self.twos.append(self._conv(2 * place + 1, block.two, ahead=0 if more is None else more.weight.shape[1]))
        self._index(device)
        self.refresh()

    def _conv(self, number: int, unit: ConvUnit, *, ahead: int = 0, back: int = 0) -> _Conv:
        outer, inner = unit.weight.shape[:2]
        shapes = (outer, 9 * inner + ahead), (inner, 9 * outer + back)
        rows = [torch.zeros(shape, device=unit.weight.device).to(torch.float8_e4m3fn) for shape in shapes]
        return _Conv(unit, rows[0], rows[1], self.numbers[number])

    def _index(self, device: torch.device) -> None:
        """Where `refresh` finds what it needs."""
        norms: list[nn.BatchNorm2d] = []  # those whose output convolution 1, 2, ... reads
        for block in self.plain.blocks:
            if block.norm is not None:
                norms.append(block.norm.source[0])
            between = block.one.source[1]
            assert between is not None
            norms.append(between)
        self.norms = norms
        start, widest = 0, max(norm.num_features for norm in norms)
        rows = torch.full((len(norms), widest), sum(norm.num_features for norm in norms))  # behind the last: a zero
        for row, norm in zip(rows, norms, strict=True):
            row[: norm.num_features] = torch.arange(start, start + norm.num_features)
            start += norm.num_features
        self.places = rows.to(device)
        self.of_one = torch.tensor([2 * place for place in self.shorts], dtype=torch.int64, device=device)
        beside = torch.full((2, 2 * len(self.plain.blocks)), len(self.shorts))  # behind the last shortcut: a zero
        for row, place in enumerate(self.shorts):
            beside[0, 2 * place + 1] = beside[1, 2 * place] = row
        self.beside_two, self.beside_one = beside.to(device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the folded layers' weights again."""
        bound = torch.cat([norm.bias for norm in self.norms]).abs()
        bound = bound + _BOUND * torch.cat([norm.weight for norm in self.norms]).abs()
        unit = torch.cat([bound, bound.new_zeros(1)])[self.places].amax(1).clamp(min=1e-20) / _LARGEST
        one = unit.new_ones(1)
        unit = torch.cat([one, unit, one])  # of what a convolution reads; behind the last comes the pooling, in bf16
        blocks = self.plain.blocks
        convs = [conv for pair in zip(self.ones, self.twos, strict=True) for conv in pair if conv is not None]
        shorts = [block.shortcut for place, block in enumerate(blocks) if place in self.shorts]
        read = [conv.unit.weight for conv in convs] + [short.weight for short in shorts if short is not None]
        most = torch.stack(torch._foreach_norm(read, float("inf"))).float().clamp(min=1e-20) / _LARGEST
        own, short = torch.cat([one, most[: len(convs)]]), most[len(convs) :]
        # A shortcut shares the sum, and so the unit, of the second convolution forward and of the first one back.
        of_one, of_two, zero = self.of_one, self.of_one + 1, own.new_zeros(1)
        ratio = unit[of_one] / unit[of_two]
        ahead = torch.maximum(own, torch.cat([short * ratio, zero])[self.beside_two])
        back = torch.maximum(own, torch.cat([short, zero])[self.beside_one])
        main = torch.stack([unit[:-1] * ahead, 1 / unit[1:], back, 1 / ahead, 1 / back])
        self.numbers[: 2 * len(blocks), :5] = main.T
        self.numbers[2 * len(blocks) :, 3:5] = torch.stack([ratio / ahead[of_two], 1 / back[of_one]]).T
        for conv in convs:
            outer, inner = conv.unit.weight.shape[:2]
            self._round(conv.unit, conv.ahead[:, : 9 * inner], conv.back[:, : 9 * outer], conv.numbers)
        for row, place in enumerate(self.shorts, start=2 * len(blocks)):
            first, second, unit_of = self.ones[place], self.twos[place], blocks[place].shortcut
            assert first is not None and unit_of is not None
            columns = 9 * len(second.ahead)
            self._round(unit_of, second.ahead[:, columns:], first.back[:, columns:], self.numbers[row])

    def _round(self, unit: ConvUnit, ahead: Tensor, back: Tensor, numbers: Tensor) -> None:
        weight = unit.weight.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        self.ops.round_weights(weight, ahead, back, numbers)

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether the kernels can read such images: of 4 to 64 pixels a side, both powers of 2."""
        if not self.plain.takes(x):
            return False
        halved = 2 ** sum(stride == 2 for stride in self.strides)
        sides = all(side in (4, 8, 16, 32, 64) and side >= 2 * halved for side in x.shape[2:])
        most = max(len(conv.ahead) for conv in self.twos)
        return sides and max(images, len(x)) * x.shape[2] * x.shape[3] * most < 2**31

    def compile_for(self, sizes: Iterable[int], shape: Iterable[int]) -> None:
        """Compile the kernels for these batch sizes side by side."""
        from sparring.engine.triton.compile_ahead import compiling

        device = self.plain.head.weight.device
        with compiling():
            for size in sizes:
                x, rows = torch.zeros((size, *shape), device=device), torch.arange(size, device=device)
                logits, values = self.forward(x, rows)
                for among in (None, rows.int()):
                    self.back(logits, values, among)

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[rows], and the values: what the convolutions and the pooling read, in their order."""
        plain, ops = self.plain, self.ops
        pixels, stem, first = x[rows], plain.stem, plain.blocks[0]
        pixels = split_in_one(pixels, stem.weight.shape[1]) if stem.split else pixels
        o = conv_forward(pixels, None, *_how(stem))
        assert first.shortcut is not None
        y = ops.rounded(_rows(conv_forward(o, None, *_how(first.one))), self.numbers[0])
        added = _rows(torch.nn.functional.conv2d(o, first.shortcut.weight))
        values, short = [o, y], None
        for place, two in enumerate(self.twos):
            after = place + 1
            last = after == len(self.twos)
            norm = plain.norms[after]
            assert norm is not None
            kept = not last and after not in self.shorts
            given = (y, two.ahead, two.numbers, norm.scale.flatten(), norm.shift.flatten())
            dtype = norm.scale.dtype if last else torch.float8_e4m3fn
            added, o = ops.conv_sum(*given, added=added, shortcut=short, kept=kept, dtype=dtype)
            values.append(o)
            if last:
                break
            one, short = self.ones[after], o if after in self.shorts else None
            assert one is not None
            y = ops.conv_relu(o, one.ahead, one.numbers, one.unit.bias, stride=self.strides[after])
            values.append(y)
        head = plain.head
        return pool_forward(o.permute(0, 3, 1, 2), head.weight, head.bias), values

    def back(self, output_gradient: Tensor, values: list[Tensor], among: Tensor | None = None) -> Tensor:
        """The gradient at the stem's output, before its ReLU."""
        plain, ops = self.plain, self.ops
        read, last = values[:-1], values[-1]
        scale = plain.last.scale.flatten()
        total, g, size = ops.first_back(output_gradient, plain.head.weight, last, scale, among=among)
        for place in reversed(range(len(self.twos))):
            o, y = read[2 * place : 2 * place + 2]
            one, two, norm = self.ones[place], self.twos[place], plain.norms[place]
            dtype = g.dtype if one is not None else total.dtype
            of_y = ops.conv_back_relu(g, two.back, two.numbers, y, among=among, dtype=dtype)
            if one is None or norm is None:
                break
            more: dict[str, Any] = {"shortcut": g} if place in self.shorts else {"added": total}
            more |= {"among": among, "stride": self.strides[place]}
            total, g = ops.conv_back_sum(of_y, one.back, one.numbers, o, norm.scale.flatten(), **more)
        first, like = plain.blocks[0], o[: len(total)]
        assert first.shortcut is not None
        of_o = input_gradient(_planes(of_y), like, first.one.weight, (1, 1), (1, 1))
        of_short = input_gradient(_planes(total), like, first.shortcut.weight, (1, 1), (0, 0))
        back: Tensor = plain.pointwise.relu_back(of_o, of_short, o, among)
        return back.mul_(size[:, None, None, None])

    def to_pixels(self, gradient: Tensor) -> Tensor:
        """The gradient at the pixels, in fp32."""
        return self.plain.to_pixels(gradient)

    def move(self, gradient: Tensor, *state: Any, project: bool) -> None:
        """Take the step along the sign of that gradient."""
        self.plain.move(gradient, *state, project=project)

    def simulated(self) -> Fp8WideResNet:
        """The same network in torch's operations, to check the kernels against."""
        return Fp8WideResNet(self.plain, fp8_simulated)


def in_fp8(plain: object, x: Tensor) -> Fp8WideResNet | str:
    """The hand-written network in eight bits, for images such as x; or why there is none."""
    if not isinstance(plain, ManualWideResNet):
        return "fp8 is for hand-written wide ResNets"
    if problem := _unfit(plain):
        return problem
    ops = fp8_for(plain.head.weight.device)
    if isinstance(ops, str):
        return ops
    network = Fp8WideResNet(plain, ops)
    return network if network.takes(x) else "fp8 is for images of 8 to 64 pixels a side, a power of 2"


def _unfit(plain: ManualWideResNet) -> str:
    """Why a wide ResNet cannot run in eight bits; empty where it can."""
    first, *others = plain.blocks
    norms = [block.norm.source[0] for block in others if block.norm is not None]
    norms += [norm for block in plain.blocks if (norm := block.one.source[1]) is not None]
    widths = {side for block in plain.blocks for side in block.two.weight.shape[:2]}
    if first.norm is not None or first.shortcut is None or tuple(first.one.stride) != (1, 1) or not plain.stem.relu:
        return "fp8 is for a first block that widens the stem"
    if any((block.shortcut is not None) != (tuple(block.one.stride) == (2, 2)) for block in others):
        return "fp8 is for shortcuts with stride 2"
    if len(norms) != 2 * len(others) + 1 or not all(norm.affine for norm in norms):
        return "fp8 is for batch-norms with weights"
    if any(width % 32 for width in widths):
        return "fp8 is for multiples of 32 channels"
    return ""


def _how(unit: ConvUnit) -> tuple[Any, ...]:
    return unit.weight, unit.bias, unit.stride, unit.padding


def _rows(x: Tensor) -> Tensor:
    """(images, lines, columns, channels) of a tensor that is channels last."""
    return x.permute(0, 2, 3, 1).contiguous()


def _planes(x: Tensor) -> Tensor:
    """The way back, without a copy."""
    return x.permute(0, 3, 1, 2)
