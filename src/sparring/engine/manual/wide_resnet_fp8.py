"""The hand-written wide ResNet with its convolutions in eight bits: for attacks alone, on GPUs that multiply fp8.

All convolutions but those that read the pixels or the stem have operands of eight bits and sums in fp32, in both
directions; the stem, the first convolution behind it and the linear layer are bf16. What passes from block to block,
the sum and its gradient, stays bf16 beside its rounded copy. triton/fp8_conv.py has the kernels.

Activations and weights are as in fp8_weights.py. Gradients are e5m2. An attack needs their signs only, so each image's
is divided by its largest number behind the pooling; from there it grows or shrinks by less than 2^6 per number down to
the stem, and e5m2 has room for 2^15 on either side. `back` returns the gradient in its true size.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sparring.engine.folded_layers import ConvUnit
from sparring.engine.manual import fp8_simulated
from sparring.engine.manual.fp8_weights import LARGEST, Bounds, RoundedBlocks, fits, planes, rows
from sparring.engine.manual.fused_ops import conv_forward, input_gradient, pool_forward, split_in_one
from sparring.engine.manual.wide_resnet import ManualWideResNet


class Fp8WideResNet:
    """Pixels to logits, and the gradient back to the pixels."""

    def __init__(self, plain: ManualWideResNet, ops: ModuleType) -> None:
        """From the network in bf16, which `unfit` has nothing against. `ops`: fp8_conv, or fp8_simulated."""
        self.plain, self.ops, self.channels = plain, ops, plain.channels
        first, *others = plain.blocks
        self.strides = [int(block.one.stride[0]) for block in plain.blocks]
        device = plain.head.weight.device
        blocks = [(None, first.two, None), *((block.one, block.two, block.shortcut) for block in others)]
        self.convs = RoundedBlocks(blocks, ops, device)
        norms: list[nn.BatchNorm2d] = []  # those whose output convolution 1, 2, ... reads
        for block in plain.blocks:
            if block.norm is not None:
                norms.append(block.norm.source[0])
            between = block.one.source[1]
            assert between is not None
            norms.append(between)
        self.bounds = Bounds(norms, device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the folded layers' weights again."""
        unit = self.bounds() / LARGEST
        self.convs.refresh(torch.cat([unit.new_ones(1), unit]))

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether the kernels can read such images: of 4 to 64 pixels a side, both powers of 2."""
        halved = 2 ** sum(stride == 2 for stride in self.strides)
        return self.plain.takes(x) and fits(x, images, halved=halved, widest=self.convs.widest)

    def compile_for(self, sizes: Iterable[int], shape: Iterable[int]) -> None:
        """Compile the kernels for these batch sizes side by side."""
        from sparring.engine.triton.compile_ahead import compiling

        device = self.plain.head.weight.device
        with compiling():
            for size in sizes:
                x, those = torch.zeros((size, *shape), device=device), torch.arange(size, device=device)
                logits, values = self.forward(x, those)
                for among in (None, those.int()):
                    self.back(logits, values, among)

    def forward(self, x: Tensor, those: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[those], and the values: what the convolutions and the pooling read, in their order."""
        plain, ops, convs = self.plain, self.ops, self.convs
        pixels, stem, first = x[those], plain.stem, plain.blocks[0]
        pixels = split_in_one(pixels, stem.weight.shape[1]) if stem.split else pixels
        o = conv_forward(pixels, None, *_how(stem))
        assert first.shortcut is not None
        y = ops.rounded(rows(conv_forward(o, None, *_how(first.one))), convs.numbers[0])
        added = rows(torch.nn.functional.conv2d(o, first.shortcut.weight))
        values, short = [o, y], None
        for place, two in enumerate(convs.twos):
            after = place + 1
            last = after == len(convs.twos)
            norm = plain.norms[after]
            assert norm is not None
            kept = not last and after not in convs.shorts
            given = (y, two.ahead, two.numbers, norm.scale.flatten(), norm.shift.flatten())
            dtype = norm.scale.dtype if last else torch.float8_e4m3fn
            added, o = ops.conv_sum(*given, added=added, shortcut=short, kept=kept, dtype=dtype)
            values.append(o)
            if last:
                break
            one, short = convs.ones[after], o if after in convs.shorts else None
            assert one is not None
            y = ops.conv_relu(o, one.ahead, one.numbers, one.unit.bias, stride=self.strides[after])
            values.append(y)
        head = plain.head
        return pool_forward(planes(o), head.weight, head.bias), values

    def back(
        self, output_gradient: Tensor, values: list[Tensor], among: Tensor | None = None, *, sized: bool = True
    ) -> Tensor:
        """The gradient at the stem's output, before its ReLU; not `sized`, each image's over its size."""
        plain, ops, convs = self.plain, self.ops, self.convs
        read, last = values[:-1], values[-1]
        scale = plain.last.scale.flatten()
        total, g, size = ops.first_back(output_gradient, plain.head.weight, last, scale, among=among)
        for place in reversed(range(len(convs.twos))):
            o, y = read[2 * place : 2 * place + 2]
            one, two, norm = convs.ones[place], convs.twos[place], plain.norms[place]
            dtype = g.dtype if one is not None else total.dtype
            of_y = ops.conv_back_relu(g, two.back, two.numbers, y, among=among, dtype=dtype)
            if one is None or norm is None:
                break
            more: dict[str, Any] = {"shortcut": g} if place in convs.shorts else {"added": total}
            more |= {"among": among, "stride": self.strides[place]}
            total, g = ops.conv_back_sum(of_y, one.back, one.numbers, o, norm.scale.flatten(), **more)
        first, like = plain.blocks[0], o[: len(total)]
        assert first.shortcut is not None
        of_o = input_gradient(planes(of_y), like, first.one.weight, (1, 1), (1, 1))
        of_short = input_gradient(planes(total), like, first.shortcut.weight, (1, 1), (0, 0))
        back: Tensor = plain.pointwise.relu_back(of_o, of_short, o, among)
        return back.mul_(size[:, None, None, None]) if sized else back

    def to_pixels(self, gradient: Tensor) -> Tensor:
        """The gradient at the pixels, in fp32."""
        return self.plain.to_pixels(gradient)

    def move(self, gradient: Tensor, *state: Any, project: bool) -> None:
        """Take the step along the sign of that gradient."""
        self.plain.move(gradient, *state, project=project)

    def simulated(self) -> Fp8WideResNet:
        """The same network in torch's operations, to check the kernels against."""
        return Fp8WideResNet(self.plain, fp8_simulated)


def unfit(plain: ManualWideResNet) -> str:
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
