"""The network that an update trains, with every batch-norm and what is around it as one operation (batch_norm.py).

`fuse` reads a model's graph. Batch-norm takes the addition and the ReLU behind it into itself, and the bias of a
convolution before it too: batch-norm subtracts the mean again, so the bias moves nothing but the running mean, and its
gradient is zero. Where another layer reads what batch-norm reads (the shortcuts of wide ResNets), it reads it through
the batch-norm, so that both gradients are added there. A model that cannot be traced, whose graph depends on its mode,
or that has an unusual batch-norm raises `NotFused` with the reason, and the caller leaves it to torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparring.engine.cuda_graphs import reason
from sparring.engine.fx_graph import (
    Tracer,
    add_here,
    become,
    drop,
    give,
    hooked,
    is_max_pool_2x2,
    is_relu,
    module_of,
    only_user,
    overwrites,
    shortcut_of,
    untraceable,
)
from sparring.engine.update.fused_layers import FILLED, WHOLE, Bare, NormUnit, PoolUnit

Fused = fx.GraphModule


class NotFused(Exception):
    """A model whose batch-norms are not fused. The message is the reason."""


def fuse(
    model: nn.Module,
    norm: ModuleType,
    pooling: ModuleType,
    *,
    widen: bool = True,
) -> Fused:
    """The same network on the same tensors, its batch-norms fused with what is around them. Raises `NotFused`.

    Args:
        widen: give convolutions of odd widths the channels that cuDNN's fast kernels need.
    """
    if any(hooked(module) for module in model.modules()):
        raise NotFused("a layer has hooks, which fusing would skip")
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        other = str(Tracer().trace(model))
        model.train()
        graph = fx.GraphModule(model, Tracer().trace(model))
    except Exception as error:  # whatever a forward does that cannot be traced
        raise NotFused(untraceable(error)) from error
    finally:
        for module, training in modes:
            module.training = training
    nodes = list(graph.graph.nodes)
    if other != str(graph.graph):
        raise NotFused("its forward depends on train and eval mode")
    if any(node.op == "get_attr" for node in nodes):
        raise NotFused("a weight is used outside its layer")
    if any(overwrites(graph, node) for node in nodes):
        raise NotFused("an operation writes in place into what another reads")
    norms = [node for node in nodes if isinstance(module_of(graph, node), nn.modules.batchnorm._NormBase)]
    if not norms:
        raise NotFused("it has no batch-norm")
    if not all(_usual(graph, node) for node in norms):
        raise NotFused("a batch-norm is unusual: not 2d, not affine, without statistics or without momentum")
    if len({node.target for node in norms}) < len(norms):  # their order must not change
        raise NotFused("a batch-norm stands in two places")
    arrived = torch.zeros(256, dtype=torch.int32, device=next(model.parameters()).device)
    for node in norms:
        _take(graph, node, norm, arrived)
    for node in list(graph.graph.nodes):
        before = node.args[0] if node.args else None
        unit = module_of(graph, before) if isinstance(before, fx.Node) else None
        if is_max_pool_2x2(node) and isinstance(unit, NormUnit) and unit.relu:
            node.args, node.kwargs = (before,), {}
            become(graph, node, PoolUnit(pooling, unit.of[0].num_features))
    for node in list(graph.graph.nodes) if widen else ():
        _widen(graph, node)
    for node in list(graph.graph.nodes):
        _fork(graph, node)
        if widen:
            _fill(graph, node)
    graph.graph.lint()
    graph.recompile()
    return graph


def mismatch(graph: Fused, model: nn.Module, x: Tensor, *, compile_ahead: bool = True) -> str:
    """Why the fused layers are not trusted where x is; empty where each does what torch's operations do in fp32.

    Backward pass and statistics are checked too, layer by layer: bf16 alone turns the gradient of a deep network by
    more than most mistakes would. The model is left as it was. On the way, all kernels are compiled side by side.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [buffer.clone() for buffer in model.buffers()]
    seen: list[tuple[NormUnit, tuple[Tensor, ...]]] = []
    units = [module for module in graph.modules() if isinstance(module, NormUnit)]
    try:
        model.train()
        with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
            if compile_ahead:
                with suppress(Exception):  # for speed only; what cannot be compiled fails when it is to run
                    compile_for(graph, x)
            hooks = [unit.register_forward_pre_hook(lambda unit, given: seen.append((unit, given))) for unit in units]
            with torch.no_grad():
                graph(x)
            for hook in hooks:
                hook.remove()
        if all(_right(unit, given) for unit, given in seen):
            return ""
        return "batch-norm kernels are wrong on this device"
    except Exception as error:  # a compiler that is not there, a kernel that asks too much of the device
        return f"batch-norm kernels fail on this device ({reason(error)})"
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)


def _right(unit: NormUnit, given: tuple[Tensor, ...]) -> bool:
    """Whether a layer is near to torch's operations in fp32 on these inputs."""
    draws = torch.Generator().manual_seed(0)
    outs = 1 + unit.twice + unit.through
    at_output = [torch.randn(given[0].shape, generator=draws).to(given[0]) for _ in range(outs)]
    ours = _both_ways(unit, unit.forward, given, at_output)
    with torch.autocast(given[0].device.type, enabled=False):
        exact = _both_ways(unit, unit.plain, [t.float() for t in given], [g.float() for g in at_output])
    limits = (1e-3, 1e-3, *[0.03] * len(ours))  # statistics are fp32; for the rest bf16 is 0.004 at most
    apart = (bool((a.float() - b).norm() <= limit * b.norm()) for a, b, limit in zip(ours, exact, limits, strict=False))
    return len(ours) == len(exact) and all(apart)


def _both_ways(unit: NormUnit, way: Any, given: Sequence[Tensor], at_output: Sequence[Tensor]) -> list[Tensor]:
    """How the running statistics move, the output, and its gradients."""
    (norm,) = unit.of
    running = [tensor for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
    before = [tensor.clone() for tensor in running]
    inputs = [tensor.detach().requires_grad_() for tensor in given]
    learned = [parameter for parameter in (norm.weight, norm.bias) if parameter.requires_grad]
    with torch.enable_grad():
        out = way(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        fitting = [gradient[:, : outs[0].shape[1]] for gradient in at_output]
        gradients = torch.autograd.grad(outs, [*inputs, *learned], fitting)
    moved = [now - then for now, then in zip(running, before, strict=True)]
    torch._foreach_copy_(running, before)
    return [*moved, outs[0].detach()[:, : norm.num_features], *gradients]


def compile_for(graph: fx.GraphModule, x: Tensor) -> None:
    """Compile the layers' kernels for such images side by side. They do not run; other operations do."""
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


def _usual(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it is a 2d batch-norm with weights, running statistics and momentum."""
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return False
    norm = module_of(graph, node)
    return type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats and norm.momentum is not None


def _take(graph: fx.GraphModule, node: fx.Node, kernels: ModuleType, arrived: Tensor) -> None:
    """Replace a batch-norm and what is around it by one layer."""
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
    """Widen a convolution's output to a multiple of 16 channels, where the layer behind its batch-norm takes them."""
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
    """Let a convolution fill up its few input channels."""
    conv = module_of(graph, node)
    conv = conv.of[0] if isinstance(conv, Bare) else conv
    if type(conv) is nn.Conv2d and conv.groups == 1 and conv.in_channels < FILLED:
        unit = _bare(graph, node)
        if unit is not None:
            unit.fill = True


def _bare(graph: fx.GraphModule, node: fx.Node) -> Bare | None:
    """The convolution that a node calls, without its bias; None where it has one that counts."""
    unit = module_of(graph, node)
    if len(node.args) != 1 or node.kwargs:
        return None
    if type(unit) is nn.Conv2d and unit.bias is None:
        unit = Bare(unit, wide=False)
        become(graph, node, unit)
    return unit if isinstance(unit, Bare) else None


def _fork(graph: fx.GraphModule, node: fx.Node) -> None:
    """Give each of two readers an output of its own, and another reader of the input the input through this layer."""
    unit = module_of(graph, node)
    if not isinstance(unit, NormUnit):
        return
    readers, other = list(node.users), _other_reader(graph, node)  # layers before this one have been forked
    unit.twice, unit.through = len(readers) == 2, other is not None
    if unit.twice or unit.through:
        for place, reader in enumerate(readers):
            give(graph, node, place if unit.twice else 0, reader, node)
    if other is not None:
        give(graph, node, 1 + unit.twice, other, node.args[0])


def _other_reader(graph: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The one other reader of what a layer reads, if there is one, and it comes later."""
    before = node.args[0]
    assert isinstance(before, fx.Node)
    others = [reader for reader in before.users if reader is not node]
    if len(others) != 1 or before.op == "placeholder":
        return None  # images have no gradient
    order = list(graph.graph.nodes)
    return others[0] if order.index(others[0]) > order.index(node) else None
