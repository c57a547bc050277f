"""Small questions about a traced network, for those who rewrite or read one (fold.py, fusing.py, wide.py)."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparring.engine.cuda_graphs import reason

_ADDS: set[Any] = {operator.add, torch.add}
_RELUS: set[Any] = {F.relu, torch.relu}


class Tracer(fx.Tracer):
    """Looks into a module only as far as weights lie: one without any (normalisation) is called as it is."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module is called, not looked into."""
        return super().is_leaf_module(m, module_qualified_name) or not any(True for _ in m.parameters())


def untraceable(error: BaseException) -> str:
    """Why a forward could not be traced, from what the tracer raised."""
    if "control flow" in str(error):
        return "a forward with data-dependent control flow cannot be traced"
    return f"its forward cannot be traced ({reason(error)})"


def module_of(graph: fx.GraphModule, node: fx.Node | None) -> nn.Module | None:
    """The module that a node calls, if it calls one."""
    if node is None or node.op != "call_module":
        return None
    return graph.get_submodule(str(node.target))


def only_user(node: fx.Node) -> fx.Node | None:
    """Who reads a node, if it is one alone."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_add(node: fx.Node) -> bool:
    """Whether it is a sum of two."""
    return node.op == "call_function" and node.target in _ADDS and len(node.args) == 2 and not node.kwargs


def is_relu(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it is a ReLU, however it is written."""
    if node.op == "call_function":
        return node.target in _RELUS
    return type(module_of(graph, node)) is nn.ReLU or (node.op == "call_method" and node.target == "relu")


def is_mean(node: fx.Node) -> bool:
    """Whether it is h.mean((2, 3)), the mean over the area of a feature map."""
    over = tuple(node.args[1:]) in (((2, 3),), ([2, 3],), (2, 3))
    return node.op == "call_method" and node.target == "mean" and over and not node.kwargs


def overwrites(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it changes in place what others read too: then the order of things matters, and nobody may move any."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = bool(node.kwargs.get("inplace")) or getattr(module_of(graph, node), "inplace", False)
    if node.op in ("call_function", "call_method"):
        in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    return bool(in_place) and any(len(given.users) > 1 for given in node.all_input_nodes[:1])


def halves(node: fx.Node) -> bool:
    """Whether it is a max-pooling of 2x2 pixels, side by side."""
    given = dict(zip(("kernel_size",), node.args[1:], strict=False)) | dict(node.kwargs)
    size, stride = given.pop("kernel_size", None), given.pop("stride", None)
    usual = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    plain = len(node.args) <= 2 and all(usual.get(key) == value for key, value in given.items())
    return node.target is F.max_pool2d and plain and size in (2, (2, 2)) and stride in (None, 2, (2, 2))


def become(graph: fx.GraphModule, node: fx.Node, unit: nn.Module) -> None:
    """Let a node call this module instead."""
    name = f"unit_{node.name}"
    graph.add_submodule(name, unit)
    node.op, node.target = "call_module", name


def drop(graph: fx.GraphModule, node: fx.Node, before: fx.Node) -> None:
    """Take a node out; whoever read it reads the one before."""
    node.replace_all_uses_with(before)
    graph.graph.erase_node(node)


def shortcut_of(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Where a node is only added to another and a ReLU reads the sum: (the other, the sum, the ReLU)."""
    after = only_user(node)
    if after is None or not is_add(after):
        return None
    behind = only_user(after)
    other = after.args[1] if after.args[0] is node else after.args[0]
    if behind is None or not is_relu(graph, behind) or not isinstance(other, fx.Node) or other is node:
        return None
    return other, after, behind


def add_here(graph: fx.GraphModule, node: fx.Node, other: fx.Node, total: fx.Node) -> None:
    """Let a node read another as its second input, and stand where the sum of both stood."""
    order = list(graph.graph.nodes)
    if order.index(other) > order.index(node):  # it is computed later: move the node behind it
        other.append(node)
    drop(graph, total, node)
    node.args = (node.args[0], other)


def fork(graph: fx.GraphModule, node: fx.Node) -> None:
    """Where two read a node that gives its output twice, each gets one of its own."""
    for place, reader in enumerate(list(node.users)):
        give(graph, node, place, reader, node)


def give(graph: fx.GraphModule, node: fx.Node, place: int, reader: fx.Node, instead_of: Any) -> None:
    """Let a reader have one of the outputs of a node, instead of what it reads."""
    with graph.graph.inserting_after(node):
        reader.replace_input_with(instead_of, graph.graph.call_function(operator.getitem, (node, place)))
