"""The network that an update trains, with every batch-norm and what is around it as one operation (norm.py).

`fuse` reads a model's graph. Batch-norm takes the addition and the ReLU behind it into itself, and the bias of a
convolution before it too: batch-norm takes the mean away again, so the bias moves nothing but the running mean, and its
gradient is zero. Where somebody else reads what batch-norm reads (the shortcuts of wide ResNets), he reads it through
the batch-norm, so that both gradients are added there. A model that cannot be traced, asks for its mode, or has an
unusual batch-norm is refused with None, and the caller leaves it to torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparring.engine.fx_graph import (
    Tracer,
    add_here,
    become,
    drop,
    give,
    halves,
    is_relu,
    module_of,
    only_user,
    overwrites,
    shortcut_of,
)
from sparring.engine.update.fused_layers import FILLED, WHOLE, Bare, NormUnit, PoolUnit
from sparring.engine.update.weight_gradients import Aside


def fuse(model: nn.Module, norm: ModuleType, pooling: ModuleType, aside: Aside | None = None) -> fx.GraphModule | None:
    """The same network on the same tensors, its batch-norms fused with their surroundings; None where it cannot be.

    Args:
        aside: finds the gradients of convolutions' weights, and is to be asked for all gradients then.
    """
    if any(_watched(module) for module in model.modules()):
        return None
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        other = str(Tracer().trace(model))
        model.train()
        graph = fx.GraphModule(model, Tracer().trace(model))
    except Exception:  # whatever a foreign forward does that cannot be traced
        return None
    finally:
        for module, training in modes:
            module.training = training
    nodes = list(graph.graph.nodes)
    if other != str(graph.graph) or any(node.op == "get_attr" or overwrites(graph, node) for node in nodes):
        return None
    norms = [node for node in nodes if isinstance(module_of(graph, node), nn.modules.batchnorm._NormBase)]
    if not norms or not all(_usual(graph, node) for node in norms):
        return None
    if len({node.target for node in norms}) < len(norms):  # one layer in two places: their order is not to change
        return None
    arrived = torch.zeros(256, dtype=torch.int32, device=next(model.parameters()).device)
    for node in norms:
        _take(graph, node, norm, arrived)
    for node in list(graph.graph.nodes):
        before = node.args[0] if node.args else None
        unit = module_of(graph, before) if isinstance(before, fx.Node) else None
        if halves(node) and isinstance(unit, NormUnit) and unit.relu:
            node.args, node.kwargs = (before,), {}
            become(graph, node, PoolUnit(pooling, unit.of[0].num_features))
    for node in list(graph.graph.nodes):
        _widen(graph, node)
    for node in list(graph.graph.nodes):
        _fork(graph, node)
        _fill(graph, node)
        if aside is not None:
            _set_aside(graph, node, aside)
    graph.graph.lint()
    graph.recompile()
    return graph


def trusted(graph: fx.GraphModule, model: nn.Module, x: Tensor) -> bool:
    """Whether the units run where x is, and each does what torch's operations do in fp32, back and statistics too.

    Unit by unit, for bf16 alone turns the gradient of a deep network by more than most mistakes would. The model is
    left as it was. On the way, all kernels are compiled side by side.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [buffer.clone() for buffer in model.buffers()]
    seen: list[tuple[NormUnit, tuple[Tensor, ...]]] = []
    units = [module for module in graph.modules() if isinstance(module, NormUnit)]
    try:
        model.train()
        with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
            with suppress(Exception):  # for speed only; what cannot be compiled fails when it is to run
                compile_for(graph, x)
            hooks = [unit.register_forward_pre_hook(lambda unit, given: seen.append((unit, given))) for unit in units]
            with torch.no_grad():
                graph(x)
            for hook in hooks:
                hook.remove()
        return all(_right(unit, given) for unit, given in seen)
    except Exception:  # a compiler that is not there, a kernel that asks too much of the device
        return False
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)


def _right(unit: NormUnit, given: tuple[Tensor, ...]) -> bool:
    """Whether a unit is near to torch's operations in fp32 on these inputs."""
    draws = torch.Generator().manual_seed(0)
    slopes = [torch.randn(given[0].shape, generator=draws).to(given[0]) for _ in range(1 + unit.twice + unit.through)]
    ours = _both_ways(unit, unit.forward, given, slopes)
    with torch.autocast(given[0].device.type, enabled=False):
        exact = _both_ways(unit, unit.plain, [t.float() for t in given], [slope.float() for slope in slopes])
    limits = (1e-3, 1e-3, *[0.03] * len(ours))  # statistics are fp32; for the rest bf16 is 0.004 at most
    apart = (bool((a.float() - b).norm() <= limit * b.norm()) for a, b, limit in zip(ours, exact, limits, strict=False))
    return len(ours) == len(exact) and all(apart)


def _both_ways(unit: NormUnit, way: Any, given: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
    """How the running statistics move, the output, and its gradients."""
    (norm,) = unit.of
    running = [tensor for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
    before = [tensor.clone() for tensor in running]
    inputs = [tensor.detach().requires_grad_() for tensor in given]
    learned = [parameter for parameter in (norm.weight, norm.bias) if parameter.requires_grad]
    with torch.enable_grad():
        out = way(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        fitting = [slope[:, : outs[0].shape[1]] for slope in slopes]
        gradients = torch.autograd.grad(outs, [*inputs, *learned], fitting)
    moved = [now - then for now, then in zip(running, before, strict=True)]
    torch._foreach_copy_(running, before)
    return [*moved, outs[0].detach()[:, : norm.num_features], *gradients]


def compile_for(graph: fx.GraphModule, x: Tensor) -> None:
    """Have the units' kernels for such images compiled side by side. They do not run; other operations do."""
    from sparring.engine.triton.compile_ahead import compiling

    units = [module for module in graph.modules() if isinstance(module, NormUnit | PoolUnit)]
    for unit in units:
        unit.dry = True
    try:
        with torch.no_grad(), compiling():
            graph(x)
    finally:
        for unit in units:
            unit.dry = False


def _watched(module: nn.Module) -> bool:
    """Whether somebody has hooked onto it, who would be passed over."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def _usual(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it is a batch-norm as most are."""
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return False
    norm = module_of(graph, node)
    return type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats and norm.momentum is not None


def _take(graph: fx.GraphModule, node: fx.Node, kernels: ModuleType, arrived: Tensor) -> None:
    """Put a unit in a batch-norm's place, and what lies around it into the unit."""
    norm, before = module_of(graph, node), node.args[0]
    assert isinstance(norm, nn.BatchNorm2d) and isinstance(before, fx.Node)
    conv, bias = module_of(graph, before), None
    if type(conv) is nn.Conv2d and only_user(before) is node and len(before.args) == 1 and not before.kwargs:
        bias = conv.bias
    unit = NormUnit(norm, bias, kernels, arrived)
    become(graph, node, unit)
    if isinstance(conv, nn.Conv2d) and bias is not None:
        become(graph, before, Bare(conv, wide=False))
    added, after = shortcut_of(graph, node), only_user(node)
    if added is not None:
        other, total, after = added
        add_here(graph, node, other, total)
    if after is not None and is_relu(graph, after):
        unit.relu = True
        drop(graph, after, node)


def _widen(graph: fx.GraphModule, node: fx.Node) -> None:
    """Let a convolution have whole sixteens of channels, where what reads its batch-norm can be given them."""
    conv, norm = module_of(graph, node), only_user(node)
    if len(node.args) != 1 or node.kwargs:
        return
    conv = conv.of[0] if isinstance(conv, Bare) else conv
    if norm is None or not isinstance(module_of(graph, norm), NormUnit) or len(norm.args) > 1:
        return
    if type(conv) is not nn.Conv2d or conv.groups > 1 or conv.out_channels % WHOLE == 0:
        return
    reader = only_user(norm)
    takes = module_of(graph, reader)
    if reader is not None and type(takes) is nn.Conv2d and takes.groups == 1 and takes.bias is None:
        takes = Bare(takes, wide=False)
        become(graph, reader, takes)
    if isinstance(takes, PoolUnit) or (isinstance(takes, Bare) and takes.of[0].groups == 1):
        become(graph, node, Bare(conv, wide=True))


def _fill(graph: fx.GraphModule, node: fx.Node) -> None:
    """Let a convolution of few channels fill them up."""
    conv = module_of(graph, node)
    conv = conv.of[0] if isinstance(conv, Bare) else conv
    if type(conv) is nn.Conv2d and conv.groups == 1 and conv.in_channels < FILLED:
        unit = _bare(graph, node)
        if unit is not None:
            unit.fill = True


def _set_aside(graph: fx.GraphModule, node: fx.Node, aside: Aside) -> None:
    """Let the gradient of a convolution's weight be found aside."""
    unit = _bare(graph, node)
    if unit is not None and unit.of[0].padding_mode == "zeros" and not isinstance(unit.of[0].padding, str):
        unit.aside = aside


def _bare(graph: fx.GraphModule, node: fx.Node) -> Bare | None:
    """The convolution that a node calls, without its bias, if it can be."""
    unit = module_of(graph, node)
    if len(node.args) != 1 or node.kwargs:
        return None
    if type(unit) is nn.Conv2d and unit.bias is None:
        unit = Bare(unit, wide=False)
        become(graph, node, unit)
    return unit if isinstance(unit, Bare) else None


def _fork(graph: fx.GraphModule, node: fx.Node) -> None:
    """Where two read a unit, each gets an output of its own; and who else reads what the unit reads, reads it there."""
    unit = module_of(graph, node)
    if not isinstance(unit, NormUnit):
        return
    readers, other = list(node.users), _other_reader(graph, node)  # a unit before this one has been forked by now
    unit.twice, unit.through = len(readers) == 2, other is not None
    if unit.twice or unit.through:
        for place, reader in enumerate(readers):
            give(graph, node, place if unit.twice else 0, reader, node)
    if other is not None:
        give(graph, node, 1 + unit.twice, other, node.args[0])


def _other_reader(graph: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Who reads what a unit reads, if it is one alone, and later."""
    before = node.args[0]
    assert isinstance(before, fx.Node)
    others = [reader for reader in before.users if reader is not node]
    if len(others) != 1 or before.op == "placeholder":
        return None  # images have no gradient
    order = list(graph.graph.nodes)
    return others[0] if order.index(others[0]) > order.index(node) else None
