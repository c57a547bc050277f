"""The hand-written ResNet with its convolutions in eight bits: for attacks alone, on GPUs that multiply fp8.

All convolutions but the stem have operands of eight bits and sums in fp32, in both directions; the stem, which reads
the pixels, and the linear layer are bf16. What passes from block to block, and its gradient, stays bf16 beside its
rounded copy. Activations and weights are as in fp8_weights.py: the bound of a block's output is that of its batch-norm
plus that of its shortcut. Gradients are as in wide_resnet_fp8.py. triton/fp8_conv.py has the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparring.engine.folded_layers import ConvUnit
from sparring.engine.manual import fp8_simulated
from sparring.engine.manual.chain import Conv, ManualChain
from sparring.engine.manual.fp8_weights import LARGEST, Bounds, RoundedBlocks, fits, planes, rows
from sparring.engine.manual.fused_ops import pool_forward


class _Block(NamedTuple):
    """relu(two(one(o)) + o), or + shortcut(o); `one` ends in a ReLU."""

    one: ConvUnit
    two: ConvUnit
    shortcut: ConvUnit | None


class Fp8ResNet:
    """Pixels to logits, and the gradient back to the pixels."""

    def __init__(self, plain: ManualChain, ops: ModuleType) -> None:
        """From the network in bf16, which `unfit` has nothing against. `ops`: fp8_conv, or fp8_simulated."""
        self.plain, self.ops, self.channels = plain, ops, plain.channels
        found = _blocks(plain)
        assert not isinstance(found, str)
        self.blocks, device = found, plain.head.weight.device
        self.strides = [int(block.one.stride[0]) for block in found]
        self.convs = RoundedBlocks(found, ops, device)
        self.of_stem = torch.zeros(8, device=device)  # the numbers by which the stem's output is rounded
        self.unscaled = torch.ones(plain.head.weight.shape[1], dtype=plain.head.weight.dtype, device=device)
        layers = [plain.stem, *(layer for block in found for layer in block if layer is not None)]
        self.bounds = Bounds([_norm(layer) for layer in layers], device)
        # Which bounds add up to that of what a convolution reads.
        number = {layer: place for place, layer in enumerate(layers)}
        self.reach = torch.zeros(2 * len(found), len(layers))
        sum_of = {plain.stem}
        for place, (one, two, short) in enumerate(found):
            self.reach[2 * place, [number[layer] for layer in sum_of]] = 1
            self.reach[2 * place + 1, number[one]] = 1
            sum_of = {two, short} if short is not None else {*sum_of, two}
        self.reach = self.reach.to(device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the folded layers' weights again."""
        unit = (self.reach * self.bounds()).sum(1) / LARGEST
        self.of_stem[1] = 1 / unit[0]
        self.convs.refresh(unit)

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether the kernels can read such images: of 4 to 64 pixels a side, both powers of 2."""
        halved = 2 ** sum(stride == 2 for stride in self.strides)
        return self.plain.takes(x, images) and fits(x, images, halved=halved, widest=self.convs.widest)

    def compile_for(self, sizes: Iterable[int], shape: Iterable[int]) -> None:
        """Compile the kernels for these batch sizes side by side."""
        from sparring.engine.triton.compile_ahead import compiling

        device = self.plain.head.weight.device
        with compiling():
            for size in sizes:
                x, those = torch.zeros((size, *shape), device=device), torch.arange(size, device=device)
                logits, values = self.forward(x, those)
                for among in (None, those.int()):
                    self.to_pixels(self.back(logits, values, among))

    def forward(self, x: Tensor, those: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[those], and the values: what the convolutions and the pooling read, in their order."""
        plain, ops, convs = self.plain, self.ops, self.convs
        added: Tensor | None = rows(plain.tools.first_layer.stem(x, those, plain.stem.weight, plain.stem.bias))
        o = ops.rounded(added, self.of_stem)
        values = []
        for place, (one, two) in enumerate(zip(convs.ones, convs.twos, strict=True)):
            assert one is not None
            y = ops.conv_relu(o, one.ahead, one.numbers, one.unit.bias, stride=self.strides[place])
            values += [o, y]
            last = place + 1 == len(convs.twos)
            more: dict[str, Any] = {"shortcut": o} if place in convs.shorts else {"added": added}
            more["kept"] = not last and place + 1 not in convs.shorts
            more["dtype"] = plain.head.weight.dtype if last else o.dtype
            added, o = ops.conv_sum_relu(y, two.ahead, two.numbers, two.unit.bias, **more)
        return pool_forward(planes(o), plain.head.weight, plain.head.bias), [*values, o]

    def back(
        self, output_gradient: Tensor, values: list[Tensor], among: Tensor | None = None, *, sized: bool = True
    ) -> Tensor:
        """The gradient at the stem's output, before its ReLU; not `sized`, each image's over its size."""
        ops, convs = self.ops, self.convs
        *read, last = values
        total, g, size = ops.first_back(output_gradient, self.plain.head.weight, last, self.unscaled, among=among)
        for place in reversed(range(len(convs.twos))):
            (o, y), one, two = read[2 * place : 2 * place + 2], convs.ones[place], convs.twos[place]
            assert one is not None
            of_y = ops.conv_back_relu(g, two.back, two.numbers, y, among=among, dtype=g.dtype)
            more: dict[str, Any] = {"shortcut": g} if place in convs.shorts else {"added": total}
            more |= {"among": among, "stride": self.strides[place]}
            total, g = ops.conv_back_sum_relu(of_y, one.back, one.numbers, o, **more)
        return planes(total.mul_(size[:, None, None, None]) if sized else total)

    def to_pixels(self, gradient: Tensor) -> Tensor:
        """The gradient at the pixels, in fp32."""
        return self.plain.to_pixels(gradient)

    def move(self, gradient: Tensor, *state: Any, project: bool) -> None:
        """Take the step along the sign of that gradient."""
        self.plain.move(gradient, *state, project=project)

    def simulated(self) -> Fp8ResNet:
        """The same network in torch's operations, to check the kernels against."""
        return Fp8ResNet(self.plain, fp8_simulated)


def unfit(plain: ManualChain) -> str:
    """Why a chain cannot run in eight bits; empty where it can."""
    found = _blocks(plain)
    if isinstance(found, str):
        return found
    if any(not _has_weights(layer) for layer in (plain.stem, *(layer for block in found for layer in block))):
        return "fp8 is for batch-norms with weights"
    return ""


def _blocks(plain: ManualChain) -> list[_Block] | str:
    """The residual blocks of a chain; or why it has other layers."""
    ones, twos, blocks = plain.steps[::2], plain.steps[1::2], list[_Block]()
    if not ones or len(ones) != len(twos):
        return "fp8 is for residual blocks"
    for place, (one, two) in enumerate(zip(ones, twos, strict=True)):
        if not isinstance(one, Conv) or not isinstance(two, Conv) or one.added is not None or two.added != 2 * place:
            return "fp8 is for residual blocks"
        filters = (one.filter, two.filter, *(() if two.shortcut is None else (two.shortcut,)))
        if any(each.filled is not None for each in filters):
            return "fp8 is for multiples of 64 channels"
        if any(each.weight.shape[2] != 3 for each in filters[:2]) or two.filter.stride[0] != 1:
            return "fp8 is for residual blocks of 3x3 convolutions"
        if (one.filter.stride[0] == 2) != (two.shortcut is not None):
            return "fp8 is for shortcuts with stride 2"
        blocks.append(_Block(one.filter.unit, two.filter.unit, two.shortcut.unit if two.shortcut else None))
    return blocks


def _norm(layer: ConvUnit) -> nn.BatchNorm2d:
    norm = layer.source[1]
    assert norm is not None
    return norm


def _has_weights(layer: ConvUnit | None) -> bool:
    return layer is None or (layer.source[1] is not None and layer.source[1].affine)
