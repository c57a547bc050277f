"""A folded wide ResNet with a hand-written forward and backward pass.

Its blocks begin with a batch-norm, which no convolution can take into itself. What lies between two convolutions is one
launch here (pointwise.py): the sum of a block with the batch-norm and ReLU of the next; backward, the mask, the scale
and the shortcut's gradient. The convolutions are cuDNN's. `read_wide_resnet` reads such a network from its graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparring.engine.folded_layers import ConvUnit, Dense, ScaleShift
from sparring.engine.fx_graph import is_add, is_mean, is_relu, module_of, only_user
from sparring.engine.manual.fused_ops import (
    back_to,
    conv_forward,
    input_gradient,
    pool_back,
    pool_forward,
    split_in_one,
)
from sparring.engine.triton.available import kernels_for, pointwise_for


class ManualBlock(NamedTuple):
    """two(one(o)) + the sum before it, or + shortcut(o); o = relu(norm(the sum before)). `one` ends in a ReLU.

    The first block's norm may be part of the stem, which then ends in a ReLU too.
    """

    norm: ScaleShift | None
    one: ConvUnit
    two: ConvUnit
    shortcut: ConvUnit | None


class ManualWideResNet:
    """Pixels to logits, and the gradient back to the pixels."""

    def __init__(
        self,
        stem: ConvUnit,
        blocks: list[ManualBlock],
        norm: ScaleShift,
        head: Dense,
        tools: tuple[ModuleType, ModuleType],
    ) -> None:
        self.stem, self.blocks, self.head = stem, blocks, head
        self.norms, self.last = [*(block.norm for block in blocks), norm], norm
        self.kernels, self.pointwise = tools
        self.channels = stem.inputs

    def refresh(self) -> None:
        """Nothing to do: the folded layers' own weights are used."""

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether these are fp32 images of the right channels."""
        return x.dtype == torch.float32 and x.ndim == 4 and x.shape[1] == self.channels

    def compile_for(self, sizes: Iterable[int], shape: Iterable[int]) -> None:
        """Compile the kernels side by side; they are the same for all batch sizes."""
        from sparring.engine.triton.compile_ahead import compiling

        with compiling():
            for place, norm in enumerate(self.norms):
                if norm is None:
                    continue
                block = self.blocks[place] if place < len(self.blocks) else None
                ends, identity = block is None, block is not None and block.shortcut is None
                x = torch.empty((1, norm.scale.numel(), 2, 2), dtype=norm.scale.dtype, device=norm.scale.device)
                self.pointwise.norm_relu(x, x if place else None, norm.scale, norm.shift, kept=place > 0 and identity)
                for among in (None, torch.zeros(1, dtype=torch.int32, device=x.device)):
                    more, other = (None if ends or identity else x), (x if identity else None)
                    self.pointwise.norm_relu_back(x, more, x, norm.scale, other=other, among=among)

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[rows], and the values: what each block's two convolutions read, and what the head reads."""
        pixels, stem = x[rows], self.stem
        pixels = split_in_one(pixels, stem.weight.shape[1]) if stem.split else pixels
        total = conv_forward(pixels, None, *_how(stem)) if stem.relu else _conv(pixels, stem)
        o = total if stem.relu else self._norm(0, total, None, kept=False)
        values = []
        for place, (_, one, two, shortcut) in enumerate(self.blocks):
            y = conv_forward(o, None, *_how(one))
            values += [o, y]
            added, total = total if shortcut is None else _conv(o, shortcut), _conv(y, two)
            after = self.blocks[place + 1] if place + 1 < len(self.blocks) else None
            o = self._norm(place + 1, total, added, kept=after is not None and after.shortcut is None)
        return pool_forward(o, self.head.weight, self.head.bias), [*values, o]

    def _norm(self, place: int, total: Tensor, added: Tensor | None, *, kept: bool) -> Tensor:
        norm = self.norms[place]
        assert norm is not None
        o: Tensor = self.pointwise.norm_relu(total, added, norm.scale, norm.shift, kept=kept)
        return o

    def back(
        self, output_gradient: Tensor, values: list[Tensor], among: Tensor | None = None, *, sized: bool = True
    ) -> Tensor:
        """The gradient at the stem's output, before its ReLU."""
        back = self.pointwise.norm_relu_back
        *read, last = values
        of_o = pool_back(output_gradient, self.head.weight, last, among=among).contiguous(
            memory_format=torch.channels_last
        )
        total: Tensor = back(of_o, None, last, self.last.scale, among=among)
        for place, (norm, one, two, shortcut) in reversed(list(enumerate(self.blocks))):
            o, y = read[2 * place : 2 * place + 2]
            of_one = back_to(y, total, two.weight, two.stride, two.padding, None, among)
            like = o[: len(total)]
            of_o, more = input_gradient(of_one, like, one.weight, one.stride, one.padding), None
            if shortcut is not None:
                more = input_gradient(total, like, shortcut.weight, shortcut.stride, shortcut.padding)
            if norm is None:
                total = self.pointwise.relu_back(of_o, more, o, among)
            else:
                total = back(of_o, more, o, norm.scale, other=total if shortcut is None else None, among=among)
        return total

    def to_pixels(self, gradient: Tensor) -> Tensor:
        """The gradient at the pixels, in fp32."""
        weight, (images, _, height, width) = self.stem.weight, gradient.shape
        shape = (images, weight.shape[1], height, width)
        like = torch.empty(
            shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last
        )  # for its shape
        pixels = input_gradient(gradient, like, weight, self.stem.stride, self.stem.padding)
        return pixels[:, : self.channels].float().contiguous()

    def move(self, gradient: Tensor, *state: Any, project: bool) -> None:
        """Take the step along the sign of that gradient."""
        x_adv, x, target, kicks, *numbers = state
        self.kernels.move(x_adv, x, kicks, self.to_pixels(gradient), target, *numbers, project=project)


def _how(unit: ConvUnit) -> tuple[Any, ...]:
    return unit.weight, unit.bias, unit.stride, unit.padding


def _conv(x: Tensor, unit: ConvUnit) -> Tensor:
    return F.conv2d(x, unit.weight, None, unit.stride, unit.padding)


def read_wide_resnet(graph: fx.GraphModule, device: torch.device) -> ManualWideResNet | None:
    """The hand-written network of a folded graph; None where it is not a wide ResNet."""
    kernels, pointwise = kernels_for(device), pointwise_for(device)
    if kernels is None or pointwise is None:
        return None
    try:
        return ManualWideResNet(*_read(graph), (kernels, pointwise))
    except _Unknown:
        return None


class _Unknown(Exception):
    """The graph is not a wide ResNet's."""


def _read(graph: fx.GraphModule) -> tuple[ConvUnit, list[ManualBlock], ScaleShift, Dense]:
    """The parts of a wide ResNet in their order, found from the pixels on by the readers of every node."""
    node, *others = [node for node in graph.graph.nodes if node.op == "placeholder"]
    _must(not others)
    while isinstance(module_of(graph, only_user(node)), nn.Identity):
        node = _after(node)
    total = _after(node)
    stem = _unit(module_of(graph, total), ConvUnit)
    _must(_bare(stem, 3) or (stem.fused and stem.relu and _square(stem, 3)))
    _must(tuple(stem.stride) == (1, 1) and len(total.args) == 1)
    blocks: list[ManualBlock] = []
    while True:
        norm, relu, identity = None, total, False  # where the stem ends in a ReLU, which the first block reads
        if blocks or not stem.relu:
            norms = [reader for reader in total.users if isinstance(module_of(graph, reader), ScaleShift)]
            _must(len(norms) == 1)
            norm, identity = _unit(module_of(graph, norms[0]), ScaleShift), len(total.users) > 1
            relu = _after(norms[0])
            _must(is_relu(graph, relu))
        if norm is not None and any(reader.op == "call_method" for reader in relu.users):
            return stem, blocks, norm, _head(graph, relu)
        shortcut, there = None, total
        convolutions = {reader: module_of(graph, reader) for reader in relu.users}
        _must(len(convolutions) == (1 if identity else 2))
        if not identity:
            bare = [reader for reader, unit in convolutions.items() if _bare(unit, 1)]
            _must(len(bare) == 1)
            there, shortcut = bare[0], _unit(convolutions.pop(bare[0]), ConvUnit)
        ((one_at, found),) = convolutions.items()
        one, two_at = _unit(found, ConvUnit), _after(one_at)
        two = _unit(module_of(graph, two_at), ConvUnit)
        _must(one.fused and one.relu and _square(one, 3) and len(one_at.args) == 1)
        _must(_bare(two, 3) and tuple(two.stride) == (1, 1))
        added = _after(two_at)
        _must(is_add(added) and set(added.args) == {two_at, there})
        blocks.append(ManualBlock(norm, one, two, shortcut))
        _must(_adds_up(blocks[-1]))
        total = added


def _adds_up(block: ManualBlock) -> bool:
    """Whether the two summands of a block have the same shape: torch would broadcast."""
    stride = (1, 1) if block.shortcut is None else tuple(block.shortcut.stride)
    return tuple(block.one.stride) == stride  # torch broadcasts a single channel, and all have several


def _head(graph: fx.GraphModule, relu: fx.Node) -> Dense:
    mean = _after(relu)
    last = _after(mean)
    _must(is_mean(mean) and _after(last).op == "output")
    return _unit(module_of(graph, last), Dense)


U = TypeVar("U", ConvUnit, ScaleShift, Dense)


def _unit(module: nn.Module | None, kind: type[U]) -> U:
    if not isinstance(module, kind):
        raise _Unknown
    return module


def _after(node: fx.Node) -> fx.Node:
    """The only reader of a node."""
    reader = only_user(node)
    if reader is None:
        raise _Unknown
    return reader


def _bare(unit: Any, side: int) -> bool:
    """Whether it is a square convolution without batch-norm, bias, addition or ReLU."""
    if (
        not isinstance(unit, ConvUnit)
        or unit.relu
        or unit.bias_is_shared
        or unit.groups != 1
        or tuple(unit.dilation) != (1, 1)
    ):
        return False
    conv, norm = unit.source
    return norm is None and conv.bias is None and _square(unit, side)


def _square(unit: ConvUnit, side: int) -> bool:
    """Whether its filters have this side, images keep their size but for the stride, and it has several channels.

    An image of one channel is contiguous in both memory formats, and torch may choose the other one.
    """
    shape, around = unit.weight.shape, (side // 2, side // 2)
    return shape[2:] == (side, side) and tuple(unit.padding) == around and shape[0] > 1


def _must(holds: bool) -> None:
    if not holds:
        raise _Unknown
