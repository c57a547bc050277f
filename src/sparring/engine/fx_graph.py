"""Queries and edits of a traced network, for the modules that rewrite or read one (folded, fuse_bn, manual)."""

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
    """Traces into modules that hold weights; any other (normalisation of pixels) is called as it is."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module is called and not traced into."""
        return super().is_leaf_module(m, module_qualified_name) or not any(True for _ in m.parameters())


def hooked(module: nn.Module) -> bool:
    """Whether it has hooks: they may compute what the forward reads, such as a normalised weight."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def untraceable(error: BaseException) -> str:
    """Why a forward could not be traced, from what the tracer raised."""
    if "control flow" in str(error):
        return "a forward with data-dependent control flow cannot be traced"
    return f"its forward cannot be traced ({reason(error)})"


def module_of(graph: fx.GraphModule, node: fx.Node | None) -> nn.Module | None:
    """The module that a node calls; None where it calls none."""
    if node is None or node.op != "call_module":
        return None
    return graph.get_submodule(str(node.target))


def only_user(node: fx.Node) -> fx.Node | None:
    """The only reader of a node; None where there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_add(node: fx.Node) -> bool:
    """Whether it adds two values."""
    return node.op == "call_function" and node.target in _ADDS and len(node.args) == 2 and not node.kwargs


def is_relu(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it is a ReLU: a function, a method or a module."""
    if node.op == "call_function":
        return node.target in _RELUS
    return type(module_of(graph, node)) is nn.ReLU or (node.op == "call_method" and node.target == "relu")


def is_mean(node: fx.Node) -> bool:
    """Whether it is h.mean((2, 3)), the mean over the area of a feature map."""
    over = tuple(node.args[1:]) in (((2, 3),), ([2, 3],), (2, 3))
    return node.op == "call_method" and node.target == "mean" and over and not node.kwargs


def overwrites(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it writes in place into what other nodes read too: then the order matters, and no node may be moved."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = bool(node.kwargs.get("inplace")) or getattr(module_of(graph, node), "inplace", False)
    if node.op in ("call_function", "call_method"):
        in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    return bool(in_place) and any(len(given.users) > 1 for given in node.all_input_nodes[:1])


def is_max_pool_2x2(node: fx.Node) -> bool:
    """Whether it is a max-pooling of 2x2 pixels with stride 2."""
    given = dict(zip(("kernel_size",), node.args[1:], strict=False)) | dict(node.kwargs)
    size, stride = given.pop("kernel_size", None), given.pop("stride", None)
    usual = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    plain = len(node.args) <= 2 and all(usual.get(key) == value for key, value in given.items())
    return node.target is F.max_pool2d and plain and size in (2, (2, 2)) and stride in (None, 2, (2, 2))


def become(graph: fx.GraphModule, node: fx.Node, unit: nn.Module) -> None:
    """Make a node call this module instead."""
    name = f"unit_{node.name}"
    graph.add_submodule(name, unit)
    node.op, node.target = "call_module", name


def drop(graph: fx.GraphModule, node: fx.Node, before: fx.Node) -> None:
    """Remove a node; its readers read the one before."""
    node.replace_all_uses_with(before)
    graph.graph.erase_node(node)


def shortcut_of(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(other, sum, ReLU) where a node is only added to another and only a ReLU reads the sum; else None."""
    after = only_user(node)
    if after is None or not is_add(after):
        return None
    behind = only_user(after)
    other = after.args[1] if after.args[0] is node else after.args[0]
    if behind is None or not is_relu(graph, behind) or not isinstance(other, fx.Node) or other is node:
        return None
    return other, after, behind


def add_here(graph: fx.GraphModule, node: fx.Node, other: fx.Node, total: fx.Node) -> None:
    """Make a node read another as its second input, and take the place of the sum of both."""
    order = list(graph.graph.nodes)
    if order.index(other) > order.index(node):  # it is computed later: move the node behind it
        other.append(node)
    drop(graph, total, node)
    node.args = (node.args[0], other)


def fork(graph: fx.GraphModule, node: fx.Node) -> None:
    """Give each reader of a node that returns its output twice an output of its own."""
    for place, reader in enumerate(list(node.users)):
        give(graph, node, place, reader, node)


def give(graph: fx.GraphModule, node: fx.Node, place: int, reader: fx.Node, instead_of: Any) -> None:
    """Make a reader read one of a node's outputs instead of what it reads."""
    with graph.graph.inserting_after(node):
        reader.replace_input_with(instead_of, graph.graph.call_function(operator.getitem, (node, place)))
