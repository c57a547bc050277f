"""A folded network's forward and backward pass on a CPU, without autograd.

A forward pass keeps what the ReLUs and poolings need, and the backward pass may be that of fewer examples than went
forward, so that an example that stops costs no gradient. Layers with a rule here are convolutions, linear layers,
scales, ReLUs, sums, poolings and reshapes; any other runs autograd of its own. Knows no attack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparring.engine.attack.folded import Folded
from sparring.engine.folded_layers import ConvUnit, Dense, ScaleShift
from sparring.engine.fx_graph import is_add, is_mean, is_relu, module_of
from sparring.engine.manual.fused_ops import split
from sparring.models.normalize import Normalize

_aten = torch.ops.aten
# (gradient of the output, the examples' places in the forward pass or None for all) -> gradients of the inputs
Pull = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
Rule = Callable[..., tuple[Tensor, Pull]]  # inputs -> output, pull


class CPUPasses:
    """A folded network with `forward_back`. Called, it is the folded network itself, with autograd."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.refresh = folded.refresh
        self.rules: list[tuple[Rule, list[int]]] = []  # in the order of the forward pass, with the places of the inputs
        place: dict[fx.Node, int] = {}  # of a node's value among those of the forward pass; the pixels are the first
        for node in folded.graph.graph.nodes:
            inputs = [place[given] for given in node.all_input_nodes]
            if node.op == "output":
                self.logits = inputs[0]
            elif isinstance(module_of(folded.graph, node), nn.Identity):
                place[node] = inputs[0]
            else:
                if node.op != "placeholder":
                    self.rules.append((_rule(folded.graph, node), inputs))
                place[node] = len(self.rules)

    def __call__(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        logits: Tensor = self.folded(x)
        return logits

    def forward_back(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor | None], Tensor]]:
        """The logits, and the backward pass: of all examples, or of those at `among` from their rows of a gradient."""
        values, pulls = [x.detach()], list[Pull]()
        with torch.no_grad():
            for rule, inputs in self.rules:
                value, pull = rule(*[values[given] for given in inputs])
                values.append(value)
                pulls.append(pull)
        logits, count = values[self.logits], len(values)

        def back(gradient: Tensor, among: Tensor | None = None) -> Tensor:
            found: list[Tensor | None] = [None] * count
            found[self.logits] = gradient.to(logits.dtype)
            with torch.no_grad():
                for place in range(count - 1, 0, -1):
                    whole = found[place]
                    if whole is None:  # the logits do not depend on it
                        continue
                    for given, part in zip(self.rules[place - 1][1], pulls[place - 1](whole, among), strict=True):
                        sofar = found[given]
                        found[given] = part if sofar is None else sofar + part
                pixels = found[0]
                assert pixels is not None
                return pixels.to(x.dtype).contiguous()

        return logits.to(x.dtype), back


def _of(kept: Tensor, among: Tensor | None) -> Tensor:
    """The rows of what was kept, in its memory layout."""
    if among is None:
        return kept
    if kept.ndim == 4 and not kept.is_contiguous():
        return kept.permute(0, 2, 3, 1).index_select(0, among).permute(0, 3, 1, 2)
    return kept.index_select(0, among)


def _rule(graph: fx.GraphModule, node: fx.Node) -> Rule:
    """How to compute a node and its gradient."""
    module = module_of(graph, node)
    if isinstance(module, ConvUnit):
        return _convolution(module)
    if isinstance(module, Dense) and not module.pools:
        return _linear(module)
    if isinstance(module, ScaleShift):
        return lambda x: (module(x), lambda g, among: (g * module.scale,))
    if isinstance(module, Normalize):
        return lambda x: (module(x), lambda g, among: (g / module.std,))
    if is_relu(graph, node):
        return _relu
    if is_add(node) and len(node.all_input_nodes) == 2:
        return lambda x, z: (x + z, lambda g, among: (g, g))
    if is_mean(node):
        return lambda x: (x.mean((2, 3)), lambda g, among: (_spread(g, x),))
    if node.op == "call_method" and node.target == "flatten" and tuple(node.args[1:]) == (1,):
        return lambda x: (x.flatten(1), lambda g, among: (_shaped(g, x),))
    if node.target is F.avg_pool2d and len(node.args) == 2 and isinstance(node.args[1], int) and not node.kwargs:
        return _average_pooling(node.args[1])
    return _by_autograd(graph, node)


def _convolution(unit: ConvUnit) -> Rule:
    def rule(x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Pull]:
        given = split(x, unit.weight.shape[1]) if unit.split else x
        places: tuple[Any, Any, Any] = unit.stride, unit.padding, unit.dilation
        y = F.conv2d(given, unit.weight, unit.bias, *places, unit.groups)
        if z is not None:
            y += z
        if unit.relu:
            y.relu_()

        def pull(g: Tensor, among: Tensor | None) -> tuple[Tensor, ...]:
            if unit.relu:
                g = _aten.threshold_backward(g, _of(y, among), 0)
            # Of the input only the shape is read, for the gradient of the weights is not asked for.
            of_x = _aten.convolution_backward(
                g, given[: len(g)], unit.weight, None, *places, False, (0, 0), unit.groups, (True, False, False)
            )[0]
            of_x = of_x[:, : unit.inputs].float() if unit.split else of_x  # both halves meet the same weights
            return (of_x,) if z is None else (of_x, g)

        return y, pull

    return rule


def _linear(unit: Dense) -> Rule:
    def rule(x: Tensor) -> tuple[Tensor, Pull]:
        return unit(x), lambda g, among: ((g.to(unit.weight.dtype) @ unit.weight).to(x.dtype),)

    return rule


def _relu(x: Tensor) -> tuple[Tensor, Pull]:
    y = F.relu(x)
    return y, lambda g, among: (_aten.threshold_backward(g, _of(y, among), 0),)


def _spread(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of a mean over the area of x."""
    return (g / x[0, 0].numel())[:, :, None, None].expand(len(g), *x.shape[1:])


def _shaped(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, flattened, in the shape and layout of x: elsewhere strides that differ are slow."""
    whole = g.view(g.shape[0], *x.shape[1:])
    return whole if x.is_contiguous() else whole.contiguous(memory_format=torch.channels_last)


def _average_pooling(size: int) -> Rule:
    def rule(x: Tensor) -> tuple[Tensor, Pull]:
        sides = (size, size)

        def pull(g: Tensor, among: Tensor | None) -> tuple[Tensor, ...]:
            return (_aten.avg_pool2d_backward(g, x[: len(g)], sides, sides, (0, 0), False, True, None),)

        return F.avg_pool2d(x, size), pull

    return rule


def _by_autograd(graph: fx.GraphModule, node: fx.Node) -> Rule:
    """Any other operation. Where fewer examples go back, it is computed once more for them: most are cheap."""

    def compute(*inputs: Tensor) -> Any:
        by_node = dict(zip(node.all_input_nodes, inputs, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: by_node[given])
        if node.op == "call_module":
            return graph.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def differentiable(*inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        leaves = tuple(given.detach().requires_grad_() for given in inputs)
        with torch.enable_grad():
            return leaves, compute(*leaves)

    def rule(*inputs: Tensor) -> tuple[Tensor, Pull]:
        leaves, y = differentiable(*inputs)

        def pull(g: Tensor, among: Tensor | None) -> tuple[Tensor, ...]:
            own, out = (leaves, y) if among is None else differentiable(*(_of(given, among) for given in inputs))
            return torch.autograd.grad(out, own, g.to(out.dtype))

        return y.detach(), pull

    return rule
