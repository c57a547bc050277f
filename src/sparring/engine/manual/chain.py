"""A folded network with a hand-written forward and backward pass: one launch per layer, each way.

Autograd would pass a gradient from layer to layer and launch the sums and masks between them on their own. Here the
kernel that computes a gradient also adds the shortcut's and applies the mask of the ReLU below it, a 1x1 shortcut is
part of the convolution it is added to (conv.py), and the last kernel takes the attack's step (first_layer.py).
read_chain.py finds the networks that can be run so.

Every gradient that is passed on is the one before the ReLU which made its value, so a mask is applied once, by the
kernel that computes the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparring.engine.folded_layers import ConvUnit, Dense
from sparring.engine.manual.fused_ops import back_to, conv_forward, pool_back, pool_forward

FromShortcuts = dict[int, tuple[Tensor, "Filter | None"]]  # gradients from shortcuts, by the value they belong to


class Tools(NamedTuple):
    """The kernels' modules, the counters they share (conv.conv), and cuDNN's convolutions."""

    conv: ModuleType
    first_layer: ModuleType
    pooling: ModuleType
    arrived: Tensor
    cudnn: Callable[..., Tensor] = conv_forward
    cudnn_back: Callable[..., Tensor] = back_to
    among: Tensor | None = None  # the places of a gradient's images in the forward pass, where they are fewer


class Filter:
    """A convolution's weight and bias as the kernels read them: channels filled up to a multiple of 64 with zeros."""

    def __init__(self, unit: ConvUnit, inner: int) -> None:
        """`inner`: channels of the input, with the zeros that fill them up."""
        self.unit, self.stride, self.padding = unit, unit.stride, unit.padding
        self.outer = -(-len(unit.weight) // 64) * 64
        self.filled: tuple[Tensor, Tensor] | None = None  # where the layer's own has other channels
        if (self.outer, inner) != unit.weight.shape[:2]:
            shape = (self.outer, inner, *unit.weight.shape[2:])
            weight = unit.weight.new_zeros(shape).to(memory_format=torch.channels_last)
            self.filled = (weight, unit.bias.new_zeros(self.outer))

    @property
    def weight(self) -> Tensor:
        """(outer, inner, side, side)."""
        return self.unit.weight if self.filled is None else self.filled[0]

    @property
    def bias(self) -> Tensor:
        """(outer,)."""
        return self.unit.bias if self.filled is None else self.filled[1]

    def refresh(self) -> None:
        """Read the layer's weights again, where they are copied."""
        if self.filled is not None:
            outer, inner = self.unit.weight.shape[:2]
            self.weight[:outer, :inner].copy_(self.unit.weight)
            self.bias[:outer].copy_(self.unit.bias)


@dataclass(frozen=True)
class Conv:
    """relu(conv(value before) [+ an earlier value, or a 1x1 convolution of it])."""

    filter: Filter
    added: int | None = None
    shortcut: Filter | None = None

    def forward(self, values: list[Tensor], tools: Tools) -> Tensor:
        """The next value."""
        x, of = values[-1], self.filter
        added = None if self.added is None else values[self.added]
        if self.shortcut is None and tools.conv.cudnn_is_faster(x, of.weight, of.stride[0], back=False):
            return tools.cudnn(x, added, of.weight, of.bias, of.stride, of.padding)
        how = {"stride": of.stride[0], "arrived": tools.arrived} | _more(added, self.shortcut)
        out: Tensor = tools.conv.conv(x, of.weight, bias=of.bias, relu=True, **how)
        return out

    def back(
        self, gradient: Tensor, values: list[Tensor], place: int, from_shortcuts: FromShortcuts, tools: Tools
    ) -> Tensor:
        """The gradient at the value before."""
        y, of = values[place], self.filter
        if self.added is not None:
            from_shortcuts[self.added] = (gradient, self.shortcut)
        other, shortcut = from_shortcuts.pop(place, (None, None))
        if shortcut is None and tools.conv.cudnn_is_faster(gradient, of.weight, of.stride[0], back=True):
            return tools.cudnn_back(y, gradient, of.weight, of.stride, of.padding, other, tools.among)
        how = {"stride": of.stride[0], "arrived": tools.arrived, "among": tools.among} | _more(other, shortcut)
        out: Tensor = tools.conv.conv_back(gradient, of.weight, y=y, **how)
        return out


@dataclass(frozen=True)
class MaxPool:
    """The largest of every 2x2 pixels."""

    def forward(self, values: list[Tensor], tools: Tools) -> Tensor:
        """The next value."""
        out: Tensor = tools.pooling.max_pool(values[-1])
        return out

    def back(
        self, gradient: Tensor, values: list[Tensor], place: int, from_shortcuts: FromShortcuts, tools: Tools
    ) -> Tensor:
        """The gradient at the value before."""
        out: Tensor = tools.pooling.max_pool_back(gradient, values[place], tools.among)
        return out


class Flat:
    """relu(linear(the value before, flattened)), as an image of one pixel. What it reads comes out of a MaxPool."""

    def __init__(self, dense: Dense, channels: int, filled: int) -> None:
        self.dense, self.channels = dense, channels
        outer, inner = dense.weight.shape
        self.area = inner // channels
        # The layer reads channel by channel, the image lies in memory pixel by pixel.
        self.weight = dense.weight.new_zeros(outer, self.area, filled)

    def refresh(self) -> None:
        """Read the layer's weights again."""
        outer = len(self.weight)
        by_pixel = self.dense.weight.reshape(outer, self.channels, self.area).transpose(1, 2)
        self.weight[:, :, : self.channels].copy_(by_pixel)

    def forward(self, values: list[Tensor], tools: Tools) -> Tensor:
        """The next value."""
        flat = values[-1].permute(0, 2, 3, 1).flatten(1)
        out = torch._addmm_activation(self.dense.bias, flat, self.weight.flatten(1).t(), use_gelu=False)
        return out[:, :, None, None].contiguous(memory_format=torch.channels_last)

    def back(
        self, gradient: Tensor, values: list[Tensor], place: int, from_shortcuts: FromShortcuts, tools: Tools
    ) -> Tensor:
        """The gradient at the value before, without the mask, which MaxPool applies."""
        _, channels, height, width = values[place].shape
        flat = gradient.flatten(1) @ self.weight.flatten(1)
        return flat.reshape(len(flat), height, width, channels).permute(0, 3, 1, 2)


ChainLayer = Conv | MaxPool | Flat


class ManualChain:
    """A chain of steps behind a first convolution. It runs on one stream at a time."""

    def __init__(
        self,
        stem: ConvUnit,
        steps: list[ChainLayer],
        head: Dense,
        kernels: tuple[ModuleType, ModuleType, ModuleType],
        *,
        times: int,
        most: float,
    ) -> None:
        """`steps` come behind the stem, whose output is value 0: each reads the value before and makes the next.

        Args:
            times: how much smaller the sides of the smallest value are than the image's.
            most: numbers per pixel of the image in the largest value.
        """
        self.stem, self.steps, self.head = stem, steps, head
        self.tools = Tools(*kernels, torch.zeros(256, dtype=torch.int32, device=head.weight.device))
        self.channels = stem.inputs
        self.times, self.most = times, most

    def refresh(self) -> None:
        """Read the weights of the folded layers again."""
        for step in self.steps:
            if isinstance(step, Conv):
                step.filter.refresh()
            elif isinstance(step, Flat):
                step.refresh()

    def takes(self, x: Tensor, images: int = 0) -> bool:
        """Whether the kernels can read such images: fp32, sides that halve evenly, indices that fit into 32 bits."""
        if x.dtype != torch.float32 or x.ndim != 4 or x.shape[1] != self.channels:
            return False
        height, width = x.shape[2:]
        few = (images or len(x)) * height * width * self.most < 2**31
        return few and height % self.times == 0 and width % self.times == 0

    def compile_for(self, sizes: Iterable[int], shape: Iterable[int]) -> None:
        """Compile the layers' kernels for these batch sizes side by side. Kernels of other libraries do not run."""
        from sparring.engine.triton.compile_ahead import compiling

        dry = copy.copy(self)
        dry.tools = self.tools._replace(cudnn=_like_forward, cudnn_back=_like_back)
        x = torch.zeros(1, *shape, device=self.head.weight.device)
        with compiling():
            for size in sorted(set(sizes)):
                rows = torch.zeros(size, dtype=torch.int64, device=x.device)
                logits, values = dry.forward(x, rows)
                output_gradient = torch.zeros_like(logits)
                dry.back(output_gradient, values, among=rows.int())
                self.to_pixels(dry.back(output_gradient, values))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[rows], and all values."""
        values = [self.tools.first_layer.stem(x, rows, self.stem.weight, self.stem.bias)]
        for step in self.steps:
            values.append(step.forward(values, self.tools))
        return pool_forward(values[-1], self.head.weight, self.head.bias), values

    def back(
        self, output_gradient: Tensor, values: list[Tensor], among: Tensor | None = None, *, sized: bool = True
    ) -> Tensor:
        """The gradient before the stem's ReLU, from that at the logits; where given, of the images `among` alone."""
        gradient = pool_back(output_gradient, self.head.weight, values[-1], masked=True, among=among)
        from_shortcuts: FromShortcuts = {}
        tools = self.tools._replace(among=among)
        for place in reversed(range(len(self.steps))):
            gradient = self.steps[place].back(gradient, values, place, from_shortcuts, tools)
        return gradient

    def to_pixels(self, gradient: Tensor) -> Tensor:
        """The gradient at the pixels, in fp32."""
        pixels: Tensor = self.tools.first_layer.to_pixels(gradient, self.stem.weight, self.channels)
        return pixels

    def move(self, gradient: Tensor, *state: Any, project: bool) -> None:
        """Take the step along the sign of that gradient."""
        self.tools.first_layer.move_pixels(gradient, self.stem.weight, *state, project=project)


def _like_forward(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, stride: Any, padding: Any) -> Tensor:
    """An empty image of the shape that the convolution returns."""
    shape = (len(x), len(weight), x.shape[2] // stride[0], x.shape[3] // stride[1])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _like_back(y: Tensor, *given: Any) -> Tensor:
    """An empty image of the shape of the gradient at y."""
    return torch.empty_like(y)


def _more(added: Tensor | None, shortcut: Filter | None) -> dict[str, Any]:
    """What a kernel adds: an image, or a 1x1 convolution of it."""
    return {"z": added} if shortcut is None else {"shortcut": (added, shortcut.weight, shortcut.stride[0])}
