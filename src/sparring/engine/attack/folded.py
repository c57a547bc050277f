"""A network for gradients of the input: eval mode, batch-norm folded away, weights in the precision of the attack.

Made once from a traced model and refreshed after every weight update. Every convolution takes the batch-norm behind it
into its weight and bias, and the addition and ReLU behind that into one call where cuDNN has one; a batch-norm with no
convolution before it (wide ResNets) becomes a scale and a shift. Any architecture will do; some are also read into
passes by hand (reading.py, wide.py). A model that cannot be traced or holds a layer with weights that is not known here
is refused with None, and the caller runs the model itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, fx, nn

from sparring.attacks.eval_mode import eval_mode
from sparring.engine.folded_layers import ConvUnit, Dense, ScaleShift, Unit
from sparring.engine.fx_graph import (
    Tracer,
    add_here,
    become,
    drop,
    fork,
    is_mean,
    is_relu,
    module_of,
    only_user,
    overwrites,
    shortcut_of,
)
from sparring.engine.manual import read_chain, wide_resnet
from sparring.engine.manual.fused_ops import kernels_for, pointwise_for
from sparring.engine.manual.manual_network import ByHand, with_autograd

_Norm = nn.modules.batchnorm._NormBase  # with statistics, though perhaps without weights


class Folded(nn.Module):
    """The folded network: pixels in fp32 to logits in fp32. `refresh` after every update of the model."""

    def __init__(self, graph: fx.GraphModule, units: list[Unit], model: nn.Module) -> None:
        super().__init__()
        self.graph, self.units = graph, units
        self.of = (model,)
        self.at_once: tuple[Callable[[], None], set[Unit]] | None = None
        self.loans: list[tuple[ConvUnit, ConvUnit]] = []  # (who adds, who lends its bias)
        self.passes: ByHand | None = None  # the same by hand, where it can be
        self.dtype = torch.float32  # of weights and activations

    @property
    def pointwise(self) -> bool:
        """Whether some batch-norm could not be folded and stands alone."""
        return any(isinstance(unit, ScaleShift) for unit in self.units)

    def refresh(self) -> None:
        """Take over the model's weights and statistics."""
        if self.at_once is None:
            self.at_once = self._most_at_once()
        most, those = self.at_once
        most()
        for unit in self.units:
            if unit not in those:
                unit.refresh()
        if self.loans:
            torch._foreach_add_([unit.bias for unit, _ in self.loans], [lender.bias for _, lender in self.loans])
        if self.passes is not None:
            self.passes.refresh()

    def _most_at_once(self) -> tuple[Callable[[], None], set[Unit]]:
        """Work that refreshes many units in one launch, and which; nothing and none where that cannot be."""
        convolutions = [unit for unit in self.units if isinstance(unit, ConvUnit) and unit.in_a_row]
        norms = [unit for unit in self.units if isinstance(unit, ScaleShift) and unit.in_a_row]
        if not convolutions and not norms:
            return (lambda: None), set()
        device = next(self.buffers()).device
        kernels, pointwise = kernels_for(device), pointwise_for(device)
        if kernels is None or pointwise is None:
            return (lambda: None), set()
        works = [kernels.FoldAll([unit.addresses() for unit in convolutions])] if convolutions else []
        works += [pointwise.ScaleAll([unit.addresses() for unit in norms])] if norms else []

        def most() -> None:
            for work in works:
                work()

        return most, {*convolutions, *norms}

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        passes = self.passes
        logits: Tensor = self.graph(x) if passes is None or not passes.takes(x) else with_autograd(passes, x)
        return logits.float() if logits.dtype == torch.bfloat16 else logits


def fold(model: nn.Module, *, dtype: torch.dtype, fused: bool) -> Folded | None:
    """The folded network of a model, or None where it cannot be made.

    Args:
        dtype: of weights and activations; bf16 for speed, the model's own for exactness.
        fused: whether to use cuDNN's fused convolutions (CUDA and bf16).
    """
    try:
        with eval_mode(model):  # a forward that asks for its mode is traced in eval mode
            graph = fx.GraphModule(model, Tracer().trace(model))
    except Exception:  # whatever a foreign forward does that cannot be traced
        return None
    if any(node.op == "get_attr" or overwrites(graph, node) for node in graph.graph.nodes):
        return None  # a weight used outside of its layer, a layer that writes into what another reads
    units: list[Unit] = []
    taken: set[fx.Node] = set()  # batch-norms folded away; the same layer may stand elsewhere once more
    for node in list(graph.graph.nodes):
        module = module_of(graph, node)
        if module is None or node in taken:
            continue
        if isinstance(module, nn.Conv2d):
            if isinstance(module.padding, str) or module.padding_mode != "zeros":
                return None
            after = only_user(node)
            norm = module_of(graph, after) if after is not None else None
            folded_norm = norm if isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats else None
            unit = ConvUnit(module, folded_norm, first=not units, dtype=dtype)
            become(graph, node, unit)
            if folded_norm is not None and after is not None:
                drop(graph, after, node)
                taken.add(after)
            _absorb(graph, node, unit)
            unit.fused = fused and unit.groups == 1 and tuple(unit.dilation) == (1, 1)
            units.append(unit)
        elif isinstance(module, nn.BatchNorm2d):
            if not module.track_running_stats:
                return None
            units.append(ScaleShift(module, dtype=dtype))
            become(graph, node, units[-1])
        elif isinstance(module, nn.Linear):
            units.append(Dense(module, first=not units, dtype=dtype))
            become(graph, node, units[-1])
        elif any(True for _ in module.parameters()) or isinstance(module, _Norm):
            return None
        else:  # pooling, normalisation of pixels: a copy, for its mode is not to follow the model's
            become(graph, node, copy.deepcopy(module))
    loans = [loan for node in graph.graph.nodes if (loan := _lend(graph, node)) is not None]
    passes: ByHand | None = None
    if fused and any(isinstance(unit, ScaleShift) for unit in units):
        passes = wide_resnet.plan(graph, next(model.parameters()).device)
    elif fused:
        for node in list(graph.graph.nodes):
            _pool(graph, node)
        passes = read_chain.plan(graph, next(model.parameters()).device)
    for node in list(graph.graph.nodes):
        _fork(graph, node)
    graph.graph.lint()
    graph.recompile()
    graph.delete_all_unused_submodules()
    network = Folded(graph, units, model)
    network.loans, network.passes, network.dtype = loans, passes, dtype
    if dtype == torch.bfloat16:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.refresh()
    return network.eval()


def agrees(fused: Folded, model: nn.Module, x: Tensor, *, sizes: Sequence[int] = ()) -> bool:
    """Whether the fused operations run where x is, and are about as near to the model as the plain ones are.

    With `sizes` their kernels are made ready for so many images, and they are also tried on the most: larger batches
    are cut into larger pieces, which need more of a processor's memory than some have.

    bf16 alone turns the gradient of a deep network by a good deal (a WRN-34-10's by 0.08 of a cosine), so the plain
    operations in the same precision are what the fused ones are held against.
    """
    plain, exact = (fold(model, dtype=dtype, fused=False) for dtype in (fused.dtype, torch.float32))
    if plain is None or exact is None:
        return False
    most = max(sizes, default=0)
    try:
        if fused.passes is not None and fused.passes.takes(x):
            with suppress(Exception):  # for speed only; what cannot be compiled fails below, when it is to run
                fused.passes.compile_for((len(x), *sizes), x.shape[1:])
        (ours, uphill), (theirs, their_uphill), (logits, gradient) = (_probed(n, x) for n in (fused, plain, exact))
        if most > len(x):
            _probed(fused, x[:1].expand(most, *x.shape[1:]))
        if fused.passes is not None and fused.passes.takes(x):
            _back_for_one(fused.passes, x)
    except Exception:  # a library that lacks an operation, a compiler that is not there
        return False
    size = float(logits.abs().max())
    near = (ours - logits).abs().max() <= 2 * (theirs - logits).abs().max() + 0.02 * size + 1e-6
    turned, usual = (1 - torch.cosine_similarity(g, gradient, dim=0) for g in (uphill, their_uphill))
    return bool(near) and (bool(turned <= 2 * usual + 0.02) or not bool(gradient.any()))


def _probed(network: Folded, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and a gradient that passes through all of the network, flat."""
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        logits = network(point)
        (gradient,) = torch.autograd.grad(logits.square().sum(), point)
    return logits.detach(), gradient.flatten()


def _back_for_one(passes: ByHand, x: Tensor) -> None:
    """What autograd does not ask for and an attack does: the way back of fewer images than went forward."""
    logits, values = passes.forward(x, torch.arange(len(x), device=x.device))
    one = torch.zeros(1, dtype=torch.int32, device=x.device)
    passes.to_pixels(passes.back(torch.ones_like(logits), values, one))


def _absorb(graph: fx.GraphModule, node: fx.Node, unit: ConvUnit) -> None:
    """Pull [add ->] relu behind a convolution into its unit, where nobody else reads what lies between."""
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
    """Where two read a fused convolution, each gets an output of its own: see fused.py."""
    unit = module_of(graph, node)
    if isinstance(unit, ConvUnit) and unit.fused and unit.relu and len(node.users) == 2:
        unit.twice = True
        fork(graph, node)


def _lend(graph: fx.GraphModule, node: fx.Node) -> tuple[ConvUnit, ConvUnit] | None:
    """A convolution that is only added to a fused one (a shortcut) leaves its bias to that one: a launch less."""
    unit = module_of(graph, node)
    if not (isinstance(unit, ConvUnit) and unit.fused and unit.relu and len(node.args) == 2):
        return None
    other = node.args[1]
    lender = module_of(graph, other) if isinstance(other, fx.Node) and only_user(other) is node else None
    if not isinstance(lender, ConvUnit) or lender.relu or lender is unit:
        return None
    lender.lends = True
    return unit, lender


def _pool(graph: fx.GraphModule, node: fx.Node) -> None:
    """h.mean((2, 3)) and the linear layer behind it, as one."""
    unit = module_of(graph, node)
    before = node.args[0] if node.args else None
    if isinstance(unit, Dense) and isinstance(before, fx.Node) and is_mean(before) and only_user(before) is node:
        unit.pools = True
        node.args = (before.args[0],)
        graph.graph.erase_node(before)
