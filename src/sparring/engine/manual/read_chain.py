"""Reads a folded graph into the steps of a hand-written network (chain.py).

Known are chains of convolutions with ReLU, shortcuts around them, 2x2 max-pooling, a dense layer with ReLU, and a
linear layer at the end, over the mean of a feature map or not. Anything else is left to autograd (fused_ops.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx, nn

from sparring.engine.folded_layers import ConvUnit, Dense
from sparring.engine.fx_graph import is_max_pool_2x2
from sparring.engine.manual.chain import ChainLayer, Conv, Filter, Flat, ManualChain, MaxPool
from sparring.engine.triton.available import convolutions_for


def read_chain(graph: fx.GraphModule, device: torch.device) -> ManualChain | None:
    """The hand-written network of a folded graph; None where it holds anything that is not known here."""
    kernels = convolutions_for(device)
    found = _Reading(graph) if kernels is not None else None
    if kernels is None or found is None or not all(found.take(node) for node in graph.graph.nodes):
        return None
    if found.stem is None or found.head is None or found.waiting:
        return None
    times = max(value.smaller for value in found.values)
    most = max(value.filled / value.smaller**2 for value in found.values)
    return ManualChain(found.stem, found.steps, found.head, kernels, times=times, most=most)


class _Value(NamedTuple):
    """A value's channels, those with the zeros that fill them up, and how much smaller than the image its sides are."""

    channels: int
    filled: int
    smaller: int


class _Reading:
    """A graph while it is read, node by node. `number` maps a node to its value: -1 pixels, 0 the stem's output."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.number: dict[Any, int] = {}
        self.values: list[_Value] = []
        self.waiting: dict[Any, ConvUnit] = {}  # 1x1 shortcuts, until the layer that adds them is read
        self.flat: Any = None  # a node that is the last value, flattened
        self.dense: tuple[Any, Dense] | None = None  # a dense layer of it, until its ReLU is read
        self.stem: ConvUnit | None = None
        self.steps: list[ChainLayer] = []
        self.head: Dense | None = None

    def take(self, node: fx.Node) -> bool:
        """Read one node; whether it is known."""
        module = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        nodes: list[Any] = [arg for arg in node.args if isinstance(arg, fx.Node)]
        read, others = (nodes[0], nodes[1:]) if nodes else (None, [])
        if node.op == "placeholder":
            self.number[node] = -1
            return len(self.number) == 1
        if node.op == "output":
            return True
        if self.head is not None:
            return False
        if isinstance(module, nn.Identity | nn.Sequential) and not list(module.children()) and read in self.number:
            self.number[node] = self.number[read]
            return True
        if isinstance(module, ConvUnit) and self.stem is None:
            return self._take_stem(node, module, read, others)
        if isinstance(module, ConvUnit):
            return self._take_conv(node, module, read, others)
        if self.dense is not None and read is self.dense[0] and isinstance(module, nn.ReLU):
            dense, last = self.dense[1], self.values[-1]
            outer = len(dense.weight)
            self._append(node, Flat(dense, last.channels, last.filled), _Value(outer, outer, last.smaller))
            return True
        if self.number.get(read) == len(self.steps):
            return self._take_end(node, module)
        if isinstance(module, Dense) and read is not None and read is self.flat:
            self.dense = (node, module)
            return self.stem is not None and module.weight.dtype == self.stem.weight.dtype
        return False

    def _append(self, node: fx.Node, step: ChainLayer, value: _Value) -> None:
        self.steps.append(step)
        self.values.append(value)
        self.number[node] = len(self.steps)
        self.flat = self.dense = None

    def _take_stem(self, node: fx.Node, unit: ConvUnit, read: Any, others: list[Any]) -> bool:
        self.stem, self.number[node] = unit, 0
        self.values = [_Value(len(unit.weight), len(unit.weight), 1)]
        return self.number.get(read) == -1 and not others and unit.relu and _fits_stem(unit)

    def _take_conv(self, node: fx.Node, unit: ConvUnit, read: Any, others: list[Any]) -> bool:
        value, stride, side = self.number.get(read, -1), unit.stride[0], unit.weight.shape[2]
        if value < 0 or not _fits(unit):
            return False
        if not unit.relu:
            self.waiting[node] = unit
            return unit.bias_is_shared and side == 1 and len(unit.weight) % 64 == 0
        if value != len(self.steps) or (side == 1 and stride == 2):
            return False
        last = self.values[-1]
        filter = Filter(unit, last.filled)
        new = _Value(len(unit.weight), filter.outer, last.smaller * stride)
        if filter.outer > 1.34 * len(unit.weight):  # much of the work would be on zeros
            return False
        if not others:
            self._append(node, Conv(filter), new)
            return True
        other = self.waiting.pop(others[0], None)
        at = self.number.get(others[0] if other is None else others[0].args[0], -1)
        if not self._may_add(at, other, new):
            return False
        shortcut = None if other is None else Filter(other, self.values[at].filled)
        self._append(node, Conv(filter, at, shortcut), new)
        return shortcut is None or shortcut.filled is None

    def _may_add(self, at: int, other: ConvUnit | None, new: _Value) -> bool:
        """Whether the value `at` is not added yet, fits, and its own reader can add the shortcut's gradient."""
        reader = self.steps[at] if 0 <= at < len(self.steps) else None
        stride = 1 if other is None else other.stride[0]
        return (
            isinstance(reader, Conv)
            and reader.filter.stride[0] == stride
            and self.values[at].smaller * stride == new.smaller
            and not any(isinstance(step, Conv) and step.added == at for step in self.steps)
        )

    def _take_end(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Read what may come behind the last value."""
        last, step = self.values[-1], self.steps[-1] if self.steps else None
        if is_max_pool_2x2(node):
            self._append(node, MaxPool(), _Value(last.channels, last.filled, 2 * last.smaller))
            return True
        if isinstance(module, Dense) and (module.pools or isinstance(step, Flat)):
            self.head = module
            return last.channels == last.filled
        if node.target == "flatten" and node.args[1:] == (1,) and isinstance(step, MaxPool):
            self.flat = node
            return True
        return False


def _fits_stem(unit: ConvUnit) -> bool:
    simple = tuple(unit.stride) == (1, 1) and tuple(unit.padding) == (1, 1) and unit.weight.shape[2:] == (3, 3)
    return unit.fused and simple and len(unit.weight) % 64 == 0 and 9 * unit.inputs <= 64


def _fits(unit: ConvUnit) -> bool:
    """Whether the kernels can compute it."""
    _, _, high, wide = unit.weight.shape
    square = high == wide and tuple(unit.padding) == (high // 2, high // 2) and high in (1, 3)
    return unit.fused and square and tuple(unit.stride) in ((1, 1), (2, 2))
