"""A network for gradients of the input: eval mode, batch-norm folded away, weights in the precision of the attack.

Made once from a traced model and refreshed after every weight update. Every convolution takes the batch-norm behind it
into its weight and bias, and the addition and ReLU behind that into one call where cuDNN has one; a batch-norm with no
convolution before it (wide ResNets) becomes a scale and a shift. Any architecture will do; some also get a hand-written
forward and backward pass (manual/). A model that cannot be folded raises `NotFolded` with the reason, and the caller
runs the model itself. Before a folded network is trusted, `mismatch` and `fused_mismatch` check it on images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from sparring.attacks.eval_mode import eval_mode
from sparring.engine.cuda_graphs import reason
from sparring.engine.folded_layers import ConvUnit, Dense, ScaleShift, Unit
from sparring.engine.fx_graph import (
    Tracer,
    add_here,
    become,
    drop,
    fork,
    hooked,
    is_mean,
    is_relu,
    module_of,
    only_user,
    overwrites,
    shortcut_of,
    untraceable,
)
from sparring.engine.manual.fp8 import Fp8Network
from sparring.engine.manual.manual_network import ManualNetwork, with_autograd
from sparring.engine.manual.read_chain import read_chain
from sparring.engine.manual.wide_resnet import read_wide_resnet
from sparring.engine.triton.available import kernels_for, pointwise_for

_Norm = nn.modules.batchnorm._NormBase  # with statistics, though perhaps without weights


_SHARE = 0.25  # of what a step in bf16 gains, at least, for eight bits: low, because a resumed run must choose the same


class NotFolded(Exception):
    """A model that cannot be folded. The message is the reason."""


class Folded(nn.Module):
    """The folded network: pixels in fp32 to logits in fp32. `refresh` after every update of the model."""

    def __init__(
        self, graph: fx.GraphModule, units: list[Unit], model: nn.Module, *, dtype: torch.dtype, at_once: bool = True
    ) -> None:
        """`at_once`: refresh many layers in one launch, where Triton runs."""
        super().__init__()
        self.graph, self.units = graph, units
        self.of = (model,)
        self.refreshed_at_once: tuple[Callable[[], None], set[Unit]] | None = None if at_once else (_nothing, set())
        self.shared_biases: list[tuple[ConvUnit, ConvUnit]] = []  # (the layer that adds, the one whose bias it takes)
        self.manual: ManualNetwork | None = None  # the hand-written network, where there is one
        self.dtype = dtype  # of weights and activations

    @property
    def pointwise(self) -> bool:
        """Whether some batch-norm could not be folded and stands alone."""
        return any(isinstance(unit, ScaleShift) for unit in self.units)

    def refresh(self) -> None:
        """Read the model's weights and statistics again."""
        if self.refreshed_at_once is None:
            self.refreshed_at_once = self._most_at_once()
        most, those = self.refreshed_at_once
        most()
        for unit in self.units:
            if unit not in those:
                unit.refresh()
        if self.shared_biases:
            own, taken = zip(*((unit.bias, other.bias) for unit, other in self.shared_biases), strict=True)
            torch._foreach_add_(list(own), list(taken))
        if self.manual is not None:
            self.manual.refresh()

    def _most_at_once(self) -> tuple[Callable[[], None], set[Unit]]:
        """Work that refreshes many units in one launch, and these units; none where Triton does not run."""
        convolutions = [unit for unit in self.units if isinstance(unit, ConvUnit) and unit.in_a_row]
        norms = [unit for unit in self.units if isinstance(unit, ScaleShift) and unit.in_a_row]
        if not convolutions and not norms:
            return _nothing, set()
        device = next(self.buffers()).device
        kernels, pointwise = kernels_for(device), pointwise_for(device)
        if kernels is None or pointwise is None:
            return _nothing, set()
        works = [kernels.FoldAll([unit.addresses() for unit in convolutions])] if convolutions else []
        works += [pointwise.ScaleAll([unit.addresses() for unit in norms])] if norms else []

        def most() -> None:
            for work in works:
                work()

        return most, {*convolutions, *norms}

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        manual = self.manual
        logits: Tensor = self.graph.forward(x) if manual is None or not manual.takes(x) else with_autograd(manual, x)
        return logits.float() if logits.dtype == torch.bfloat16 else logits


def _nothing() -> None:
    """Refresh nothing."""


def fold(
    model: nn.Module, *, dtype: torch.dtype, fused: bool, without: Collection[str] = (), fine: bool = False
) -> Folded:
    """The folded network of a model. Raises `NotFolded` where it cannot be made.

    Args:
        dtype: of weights and activations; bf16 for speed, the model's own for exactness.
        fused: whether to use cuDNN's fused convolutions (CUDA and bf16).
        without: hand-written parts to leave out: manual, manual_wide, refresh (engine/select.py).
        fine: whether a linear layer that gives the logits runs in fp32, as hand-written networks and pooling do anyhow.
    """
    try:
        return _fold(_traced(model), model, dtype, fused, without, fine)
    except (NotFolded, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a layer that cannot be copied, a graph that cannot be rewritten
        raise NotFolded(f"folding fails ({reason(error)})") from error


def _fold(
    graph: fx.GraphModule, model: nn.Module, dtype: torch.dtype, fused: bool, without: Collection[str], fine: bool
) -> Folded:
    units: list[Unit] = []
    folded_norms: set[fx.Node] = set()  # the same layer may stand elsewhere once more
    for node in list(graph.graph.nodes):
        module = module_of(graph, node)
        if module is None or node in folded_norms:
            continue
        if isinstance(module, nn.Conv2d):
            if isinstance(module.padding, str) or module.padding_mode != "zeros":
                how = f"padding={module.padding!r}" if isinstance(module.padding, str) else module.padding_mode
                raise NotFolded(f"a convolution with {how} is not folded")
            after = only_user(node)
            norm = module_of(graph, after) if after is not None else None
            folded_norm = norm if isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats else None
            unit = ConvUnit(module, folded_norm, first=not units, dtype=dtype)
            become(graph, node, unit)
            if folded_norm is not None and after is not None:
                drop(graph, after, node)
                folded_norms.add(after)
            _absorb(graph, node, unit)
            unit.fused = fused and unit.groups == 1 and tuple(unit.dilation) == (1, 1)
            units.append(unit)
        elif isinstance(module, nn.BatchNorm2d):
            if not module.track_running_stats:
                raise NotFolded("a batch-norm without running statistics is not folded")
            units.append(ScaleShift(module, dtype=dtype))
            become(graph, node, units[-1])
        elif isinstance(module, nn.Linear):
            units.append(Dense(module, first=not units, dtype=dtype))
            become(graph, node, units[-1])
        elif any(True for _ in module.parameters()) or isinstance(module, _Norm):
            raise NotFolded(f"{type(module).__name__} is not folded")
        else:  # pooling, normalisation of pixels: a copy, because its mode must not follow the model's
            become(graph, node, copy.deepcopy(module))
    shared = [pair for node in graph.graph.nodes if (pair := _share_bias(graph, node)) is not None]
    manual: ManualNetwork | None = None
    if fused and any(isinstance(unit, ScaleShift) for unit in units):
        if "manual_wide" not in without:
            manual = read_wide_resnet(graph, next(model.parameters()).device)
    elif fused:
        for node in list(graph.graph.nodes):
            _pool(graph, node)
        if "manual" not in without:
            manual = read_chain(graph, next(model.parameters()).device)
    if fine and manual is None and dtype == torch.bfloat16:
        last = module_of(graph, graph.graph.output_node().all_input_nodes[0])
        if isinstance(last, Dense) and not last.pools:
            last.widen()
    for node in list(graph.graph.nodes):
        _fork(graph, node)
    graph.graph.lint()
    graph.recompile()
    graph.delete_all_unused_submodules()
    network = Folded(graph, units, model, dtype=dtype, at_once="refresh" not in without)
    network.shared_biases, network.manual = shared, manual
    if dtype == torch.bfloat16:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.refresh()
    return network.eval()


def _traced(model: nn.Module) -> fx.GraphModule:
    """The model's graph in eval mode."""
    # A weight that a hook or a parametrisation computes is read before the next forward pass has computed it anew.
    if any(hooked(module) for module in model.modules()):
        raise NotFolded("a layer has hooks")
    if any(is_parametrized(module) for module in model.modules()):
        raise NotFolded("a layer's weight is computed from others")
    try:
        with eval_mode(model):  # a forward that asks for its mode is traced in eval mode
            graph = fx.GraphModule(model, Tracer().trace(model))
    except Exception as error:  # whatever a forward does that cannot be traced
        raise NotFolded(untraceable(error)) from error
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise NotFolded(f"a weight is used outside its layer ({node.target})")
        if overwrites(graph, node):
            raise NotFolded(f"an operation writes in place into what another reads ({node.name})")
    return graph


@torch.no_grad()
def mismatch(folded: Folded, model: nn.Module, images: Tensor) -> str:
    """Why a folded network in the model's own precision is not the model on these images; empty where it is."""
    x = images.to(folded.dtype)
    try:
        with _exact(), eval_mode(model):
            expected, found = model(x), folded(x)
    except Exception as error:  # a traced model may not be the model
        return f"the folded network fails ({reason(error)})"
    if not isinstance(expected, Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
        return "the folded network has other outputs than the model"
    size = float(expected.abs().max())
    if torch.allclose(expected, found, rtol=1e-3, atol=1e-3 * size):
        return ""
    return f"the folded network's logits are off by {float((expected - found).abs().max()):.1g} of {size:.1g}"


@contextmanager
def _exact() -> Iterator[None]:
    """fp32 without TF32, whose rounding is as large as the differences that are looked for."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    try:
        before = [backend.allow_tf32 for backend in backends]
    except RuntimeError:  # the caller has set it by torch's newer names: do not interfere
        yield
        return
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def fused_mismatch(
    fused: Folded, model: nn.Module, x: Tensor, *, sizes: Sequence[int] = (), compile_ahead: bool = True
) -> str:
    """Why the fused operations are not trusted where x is; empty where they run and are as near to fp32 as plain ones.

    With `sizes` their kernels are compiled for these batch sizes, and they are also run on the largest: larger batches
    are cut into larger tiles, which need more shared memory than some devices have.

    bf16 alone turns the gradient of a deep network (WRN-34-10: 0.08 of a cosine), so the fused operations are compared
    with the plain ones in the same precision. A network in eight bits is compared with the same one in torch's
    operations, and its gradient must be of use beside that in bf16.
    """
    most = max(sizes, default=0)
    try:
        plain, exact = (fold(model, dtype=dtype, fused=False) for dtype in (fused.dtype, torch.float32))
        eight = fused.manual if isinstance(fused.manual, Fp8Network) else None
        same: Callable[[Tensor], Tensor] = plain if eight is None else partial(with_autograd, eight.simulated())
        takes = fused.manual is not None and fused.manual.takes(x)
        if fused.manual is not None and takes and compile_ahead:
            with suppress(Exception):  # for speed only; what cannot be compiled fails below, when it is to run
                fused.manual.compile_for((len(x), *sizes), x.shape[1:])
        (ours, gradient), (theirs, their_gradient), (logits, exact_gradient) = (
            _probed(network, x) for network in (fused, same, exact)
        )
        if most > len(x):
            _probed(fused, x[:1].expand(most, *x.shape[1:]))
        if fused.manual is not None and takes:
            _back_for_one(fused.manual, x)
    except Exception as error:  # a library that lacks an operation, a compiler that is not there
        return f"fused operations fail on this device ({reason(error)})"
    size = float(logits.abs().max())
    near = (ours - logits).abs().max() <= 2 * (theirs - logits).abs().max() + 0.02 * size + 1e-6
    if eight is not None and (problem := _too_coarse(gradient, _probed(plain, x)[1], exact_gradient)):
        return problem
    turned, usual = (1 - torch.cosine_similarity(g, exact_gradient, dim=0) for g in (gradient, their_gradient))
    if bool(near) and (bool(turned <= 2 * usual + 0.02) or not bool(exact_gradient.any())):
        return ""
    return "fused operations are less exact than plain ones on this device"


def _too_coarse(gradient: Tensor, in_bf16: Tensor, exact: Tensor) -> str:
    """Why a gradient in eight bits is not used; empty where it is.

    A step along its signs gains a share of what the signs of the exact gradient gain, to first order. Simulated:
    WRN-34-10 0.6 when new and 0.4 with its first statistics (bf16 0.96 and 0.9), a trained WRN-16-2 0.99 (0.998).
    """
    ours, theirs = (float((g.sign() * exact).sum() / exact.abs().sum().clamp(min=1e-30)) for g in (gradient, in_bf16))
    if ours >= _SHARE * theirs:
        return ""
    return f"fp8 is too coarse: a step along its gradient gains {ours:.2f} of an exact one, in bf16 {theirs:.2f}"


def _probed(network: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and a gradient that passes through all of the network, flat."""
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        logits = network(point)
        (gradient,) = torch.autograd.grad(logits.square().sum(), point)
    return logits.detach(), gradient.flatten()


def _back_for_one(manual: ManualNetwork, x: Tensor) -> None:
    """Run what an attack needs and autograd does not: the backward pass of fewer images than went forward."""
    logits, values = manual.forward(x, torch.arange(len(x), device=x.device))
    one = torch.zeros(1, dtype=torch.int32, device=x.device)
    manual.to_pixels(manual.back(torch.ones_like(logits), values, one))


def _absorb(graph: fx.GraphModule, node: fx.Node, unit: ConvUnit) -> None:
    """Pull [add ->] relu behind a convolution into its unit, where nothing else reads what lies between."""
    added, after = shortcut_of(graph, node), only_user(node)
    if added is not None:
        other, total, after = added
        unit.relu = True
        drop(graph, after, total)
        add_here(graph, node, other, total)
    elif after is not None and is_relu(graph, after):
        unit.relu = True
        drop(graph, after, node)


def _fork(graph: fx.GraphModule, node: fx.Node) -> None:
    """Where two layers read a fused convolution, give each an output of its own (manual/fused_ops.py)."""
    unit = module_of(graph, node)
    if isinstance(unit, ConvUnit) and unit.fused and unit.relu and len(node.users) == 2:
        unit.twice = True
        fork(graph, node)


def _share_bias(graph: fx.GraphModule, node: fx.Node) -> tuple[ConvUnit, ConvUnit] | None:
    """Let a fused convolution take the bias of a shortcut that is only added to it: one launch less."""
    unit = module_of(graph, node)
    if not (isinstance(unit, ConvUnit) and unit.fused and unit.relu and len(node.args) == 2):
        return None
    other = node.args[1]
    shortcut = module_of(graph, other) if isinstance(other, fx.Node) and only_user(other) is node else None
    if not isinstance(shortcut, ConvUnit) or shortcut.relu or shortcut is unit:
        return None
    shortcut.bias_is_shared = True
    return unit, shortcut


def _pool(graph: fx.GraphModule, node: fx.Node) -> None:
    """Join h.mean((2, 3)) and the linear layer behind it."""
    unit = module_of(graph, node)
    before = node.args[0] if node.args else None
    if isinstance(unit, Dense) and isinstance(before, fx.Node) and is_mean(before) and only_user(before) is node:
        unit.pools = True
        node.args = (before.args[0],)
        graph.graph.erase_node(before)
