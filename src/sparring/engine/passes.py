"""A folded residual network forward and back by hand: one launch for a layer, each way.

Autograd would hand a gradient from layer to layer and launch the sums and masks between them on their own. Here the
kernel that computes a gradient also adds what the shortcut brings and applies the mask of the ReLU below it, a 1x1
shortcut is part of the convolution it is added to, and the last kernel back takes the attack's step (conv.py). Knows
chains of convolutions with ReLU, shortcuts around them, and pooling with a linear layer at the end; to anything else
`plan` says None, and fused.py does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparring.engine.fused import back_to, conv_forward, convolutions_for, pool_back, pool_forward
from sparring.engine.units import ConvUnit, Dense


@dataclass(frozen=True)
class Layer:
    """relu(conv(read) [+ added, or a 1x1 convolution of it]). Numbers are those of the layers whose output is meant."""

    unit: ConvUnit
    read: int
    added: int | None = None
    shortcut: ConvUnit | None = None


class Passes:
    """Pixels to logits, and a gradient of the logits back to the pixels. For one stream at a time."""

    def __init__(self, stem: ConvUnit, layers: list[Layer], head: Dense, kernels: ModuleType) -> None:
        """`layers` come behind the stem, whose output has number 0."""
        self.stem, self.layers, self.head, self.kernels = stem, layers, head, kernels
        self.arrived = torch.zeros(256, dtype=torch.int32, device=head.weight.device)

    def takes(self, x: Tensor) -> bool:
        """Whether images of this size are halved without a rest, and in fp32."""
        times = math.prod(layer.unit.stride[0] for layer in self.layers)
        return x.dtype == torch.float32 and x.shape[2] % times == 0 and x.shape[3] % times == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Logits, which autograd can take back to x."""
        logits: Tensor = _Both.apply(x, self)  # type: ignore[no-untyped-call]
        return logits

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of x[rows], and the outputs of all layers."""
        values = [self.kernels.stem(x, rows, self.stem.weight, self.stem.bias)]
        for layer in self.layers:
            read, unit = values[layer.read], layer.unit
            added = None if layer.added is None else values[layer.added]
            if layer.shortcut is None and self.kernels.cudnn_is_faster(read, unit.weight, unit.stride[0], back=False):
                values.append(conv_forward(read, added, unit.weight, unit.bias, unit.stride, unit.padding))
                continue
            how = self._how(unit) | _more(added, layer.shortcut)
            values.append(self.kernels.conv(read, unit.weight, bias=unit.bias, relu=True, **how))
        return pool_forward(values[-1], self.head.weight, self.head.bias), values

    def back(self, slope: Tensor, values: list[Tensor]) -> Tensor:
        """The gradient before the stem's ReLU. So is every one on the way: before the ReLU that made its value."""
        gradient = pool_back(slope, self.head.weight, values[-1], masked=True)
        brought: dict[int, tuple[Tensor, ConvUnit | None]] = {}  # by shortcuts, until their value's own reader comes
        for layer in reversed(self.layers):
            unit, y = layer.unit, values[layer.read]
            if layer.added is not None:
                brought[layer.added] = (gradient, layer.shortcut)
            other, shortcut = brought.pop(layer.read, (None, None))
            if shortcut is None and self.kernels.cudnn_is_faster(gradient, unit.weight, unit.stride[0], back=True):
                gradient = back_to(y, gradient, unit.weight, unit.stride, unit.padding, other)
                continue
            how = self._how(unit) | _more(other, shortcut)
            gradient = self.kernels.conv_back(gradient, unit.weight, y=y, **how)
        return gradient

    def _how(self, unit: ConvUnit) -> dict[str, Any]:
        return {"stride": unit.stride[0], "arrived": self.arrived}


def _more(added: Tensor | None, shortcut: ConvUnit | None) -> dict[str, Any]:
    """What a kernel adds: an image as it is, or a 1x1 convolution of it."""
    return {"z": added} if shortcut is None else {"shortcut": (added, shortcut.weight, shortcut.stride[0])}


class _Both(torch.autograd.Function):
    """For those who differentiate by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passes: Passes) -> Tensor:
        logits, values = passes.forward(x.contiguous(), torch.arange(len(x), device=x.device))
        if ctx.needs_input_grad[0]:
            ctx.passes, ctx.values, ctx.channels = passes, values, x.shape[1]
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        passes = ctx.passes
        gradient = passes.back(gradients[0].contiguous(), ctx.values)
        return passes.kernels.to_pixels(gradient, passes.stem.weight, ctx.channels), None


def plan(graph: fx.GraphModule, device: torch.device) -> Passes | None:
    """How to run a folded graph by hand, or None where it has anything that is not known here."""
    kernels = convolutions_for(device)
    if kernels is None:
        return None
    numbers: dict[Any, int] = {}  # of the layer whose output a node is; -1 for the pixels
    waiting: dict[Any, ConvUnit] = {}  # 1x1 shortcuts, until the layer that adds them comes
    stem: ConvUnit | None = None
    layers: list[Layer] = []
    head: Dense | None = None
    for node in graph.graph.nodes:
        module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        nodes: list[Any] = [arg for arg in node.args if isinstance(arg, fx.Node)]
        read, others = (nodes[0], nodes[1:]) if nodes else (None, [])
        if node.op == "placeholder":
            numbers[node] = -1
        elif node.op == "output":
            continue
        elif read not in numbers or head is not None:
            return None
        elif isinstance(module, nn.Identity | nn.Sequential) and not list(module.children()):
            numbers[node] = numbers[read]
        elif isinstance(module, Dense) and module.pools and numbers[read] == len(layers):
            head = module
        elif not isinstance(module, ConvUnit):
            return None
        elif stem is None and numbers[read] == -1 and not others and _fits_stem(module):
            stem, numbers[node] = module, 0
        elif stem is None or numbers[read] < 0 or not _fits(module):
            return None
        elif not module.relu:
            if not module.lends or module.weight.shape[2] != 1:
                return None
            waiting[node] = module
        else:
            added = others[0] if others else None
            shortcut = waiting.pop(added, None)
            source = added if shortcut is None or added is None else added.args[0]
            if source is not None and numbers.get(source, -1) < 0:
                return None
            layers.append(Layer(module, numbers[read], None if source is None else numbers[source], shortcut))
            numbers[node] = len(layers)
    if stem is None or head is None or waiting or not _in_order(layers):
        return None
    return Passes(stem, layers, head, kernels)


def _fits_stem(unit: ConvUnit) -> bool:
    channels = unit.inputs if unit.split else unit.weight.shape[1]
    return _fits(unit, stem=True) and unit.relu and unit.stride[0] == 1 and unit.padding[0] == 1 and 9 * channels <= 64


def _fits(unit: ConvUnit, *, stem: bool = False) -> bool:
    """Whether the kernels can do it."""
    outer, inner, high, wide = unit.weight.shape
    square = high == wide and tuple(unit.padding) == (high // 2, high // 2) and high in (1, 3)
    strides = tuple(unit.stride) in ((1, 1), (2, 2))
    return unit.fused and square and strides and outer % 64 == 0 and (stem or inner % 64 == 0)


def _in_order(layers: list[Layer]) -> bool:
    """Whether each output is read by one layer and added by at most one, which comes later and by the same stride."""
    reader = {layer.read: place for place, layer in enumerate(layers)}
    adders = [layer.added for layer in layers if layer.added is not None]
    if sorted(reader) != list(range(len(layers))) or len(set(adders)) < len(adders):
        return False
    for place, layer in enumerate(layers):
        if layer.added is not None:
            stride = 1 if layer.shortcut is None else layer.shortcut.stride[0]
            if reader[layer.added] >= place or layers[reader[layer.added]].unit.stride[0] != stride:
                return False
    return True
