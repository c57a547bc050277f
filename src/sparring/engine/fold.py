"""A network for gradients of the input: eval mode, batch-norm folded away, weights in the precision of the attack.

Made once from a traced model and refreshed after every weight update. Every convolution takes the batch-norm behind it
into its weight and bias, and the addition and ReLU behind that into one call where cuDNN has one; a batch-norm with no
convolution before it (wide ResNets) becomes a scale and a shift. Knows no architecture: a model that cannot be traced
or holds a layer with weights that is not known here, is refused with None and the caller runs the model itself.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparring.attacks.setting import quiet
from sparring.engine.fused import conv_relu, kernels_for, split, split_in_one

_Norm = nn.modules.batchnorm._NormBase  # with statistics, though perhaps without weights
_ADDS: set[Any] = {operator.add, torch.add}
_RELUS: set[Any] = {F.relu, torch.relu}


class ConvUnit(nn.Module):
    """A convolution with what is folded into it: batch-norm, an addition, a ReLU."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None, *, first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        # Held in a tuple so that the parameters stay the model's and are not registered here.
        self.source = (conv, norm)
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        # bf16 keeps 8 bits: a pixel near 1 would be rounded to 1/256. The first layer sees each pixel as a sum of two
        # bf16 numbers in channels of their own, which keeps 16 bits; zeros fill the channels up to a power of 2.
        self.split = first and dtype == torch.bfloat16
        shape = list(conv.weight.shape)
        if self.split:
            self.inputs = shape[1]
            shape[1] = max(8, 1 << (2 * self.inputs - 1).bit_length())
        like = conv.weight
        self.register_buffer("weight", torch.zeros(shape, dtype=dtype, device=like.device))
        self.register_buffer("bias", torch.zeros(shape[0], dtype=dtype, device=like.device))
        self.relu, self.fused, self.twice = False, False, False

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights."""
        conv, norm = self.source
        weight = conv.weight
        bias = conv.bias
        if norm is not None:
            assert norm.running_mean is not None and norm.running_var is not None
            scale = torch.rsqrt(norm.running_var + norm.eps)
            if norm.weight is not None:
                scale = scale * norm.weight
            weight = weight * scale[:, None, None, None]
            shift = norm.running_mean if bias is None else norm.running_mean - bias
            bias = -shift * scale
            if norm.bias is not None:
                bias = bias + norm.bias
        if bias is not None:
            self.bias.copy_(bias)
        if self.split:
            self.weight[:, : self.inputs].copy_(weight)
            self.weight[:, self.inputs : 2 * self.inputs].copy_(weight)
        else:
            self.weight.copy_(weight)

    @property
    def in_a_row(self) -> bool:
        """Whether weights go over one by one, times a scale: in the same order in memory, to bf16, with batch-norm."""
        conv, norm = self.source
        weights = conv.weight, self.weight
        return (
            norm is not None
            and norm.affine
            and conv.bias is None
            and self.weight.dtype == torch.bfloat16
            and conv.weight.dtype == torch.float32
            and weights[0].shape == weights[1].shape
            and weights[0].stride() == weights[1].stride()
            and weights[0].stride(0) == weights[0][0].numel()
        )

    def addresses(self) -> tuple[list[Tensor], float]:
        """What `kernels.FoldAll` reads and writes."""
        conv, norm = self.source
        assert norm is not None and norm.running_mean is not None and norm.running_var is not None
        read = [conv.weight, norm.running_mean, norm.running_var, norm.weight, norm.bias]
        return [tensor.detach() for tensor in (*read, self.weight, self.bias)], norm.eps

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        """relu(conv(x) [+ z]), or without the ReLU; a pair of it where two layers read it."""
        if self.split:
            filled = self.weight.shape[1]
            x = split_in_one(x, filled) if self.fused else split(x, filled)
        if self.fused and self.relu:
            return conv_relu(x, z, self.weight, self.bias, self.stride, self.padding, twice=self.twice)
        out = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        if z is not None:
            out = out + z
        if self.relu:
            out = F.relu(out)
        return (out, out) if self.twice else out


class ScaleShift(nn.Module):
    """A batch-norm in eval mode with no convolution before it."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d, *, dtype: torch.dtype) -> None:
        super().__init__()
        assert norm.running_mean is not None
        self.source = (norm,)
        shape = (1, norm.num_features, 1, 1)
        self.register_buffer("scale", torch.zeros(shape, dtype=dtype, device=norm.running_mean.device))
        self.register_buffer("shift", torch.zeros(shape, dtype=dtype, device=norm.running_mean.device))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's statistics."""
        (norm,) = self.source
        assert norm.running_mean is not None and norm.running_var is not None
        scale = torch.rsqrt(norm.running_var + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight
        shift = -norm.running_mean * scale
        if norm.bias is not None:
            shift = shift + norm.bias
        self.scale.copy_(scale.reshape(self.scale.shape))
        self.shift.copy_(shift.reshape(self.shift.shape))

    def forward(self, x: Tensor) -> Tensor:
        """x * scale + shift."""
        return torch.addcmul(self.shift, x.to(self.scale.dtype), self.scale)


class Dense(nn.Module):
    """A linear layer."""

    weight: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, *, first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.source = (linear,)
        self.gives = dtype
        dtype = torch.float32 if first and dtype == torch.bfloat16 else dtype  # it reads pixels: see ConvUnit
        self.register_buffer("weight", torch.zeros_like(linear.weight, dtype=dtype))
        self.register_buffer("bias", torch.zeros(linear.out_features, dtype=dtype, device=linear.weight.device))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights."""
        (linear,) = self.source
        self.weight.copy_(linear.weight)
        if linear.bias is not None:
            self.bias.copy_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The affine map."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(self.gives)


Unit = ConvUnit | ScaleShift | Dense


class Folded(nn.Module):
    """The folded network: pixels in fp32 to logits in fp32. `refresh` after every update of the model."""

    def __init__(self, graph: fx.GraphModule, units: list[Unit], model: nn.Module) -> None:
        super().__init__()
        self.graph, self.units = graph, units
        self.of = (model,)
        self.at_once: tuple[Callable[[], None], set[Unit]] | None = None

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

    def _most_at_once(self) -> tuple[Callable[[], None], set[Unit]]:
        """Work that refreshes many units in one launch, and which; nothing and none where that cannot be."""
        those = [unit for unit in self.units if isinstance(unit, ConvUnit) and unit.in_a_row]
        kernels = kernels_for(those[0].weight.device) if those else None
        if kernels is None:
            return (lambda: None), set()
        return kernels.FoldAll([unit.addresses() for unit in those]), set(those)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        logits: Tensor = self.graph(x)
        return logits.float() if logits.dtype == torch.bfloat16 else logits


class _Tracer(fx.Tracer):
    """Looks into a module only as far as weights lie: one without any (normalisation) is called as it is."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not any(True for _ in m.parameters())


def fold(model: nn.Module, *, dtype: torch.dtype, fused: bool) -> Folded | None:
    """The folded network of a model, or None where it cannot be made.

    Args:
        dtype: of weights and activations; bf16 for speed, the model's own for exactness.
        fused: whether to use cuDNN's fused convolutions (CUDA and bf16).
    """
    try:
        with quiet(model):  # a forward that asks for its mode is traced in eval mode
            graph = fx.GraphModule(model, _Tracer().trace(model))
    except Exception:  # whatever a foreign forward does that cannot be traced
        return None
    if any(node.op == "get_attr" for node in graph.graph.nodes):  # a weight used outside of its layer
        return None
    units: list[Unit] = []
    taken: set[nn.Module] = set()  # batch-norms folded away
    for node in list(graph.graph.nodes):
        module = _module(graph, node)
        if module is None or module in taken:
            continue
        if isinstance(module, nn.Conv2d):
            if isinstance(module.padding, str) or module.padding_mode != "zeros":
                return None
            after = _only_user(node)
            norm = _module(graph, after) if after is not None else None
            folded_norm = norm if isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats else None
            unit = ConvUnit(module, folded_norm, first=not units, dtype=dtype)
            _become(graph, node, unit)
            if folded_norm is not None and after is not None:
                _drop(graph, after, node)
                taken.add(folded_norm)
            _absorb(graph, node, unit)
            unit.fused = fused and unit.groups == 1 and tuple(unit.dilation) == (1, 1)
            units.append(unit)
        elif isinstance(module, nn.BatchNorm2d):
            if not module.track_running_stats:
                return None
            units.append(ScaleShift(module, dtype=dtype))
            _become(graph, node, units[-1])
        elif isinstance(module, nn.Linear):
            units.append(Dense(module, first=not units, dtype=dtype))
            _become(graph, node, units[-1])
        elif any(True for _ in module.parameters()) or isinstance(module, _Norm):
            return None
        else:  # pooling, normalisation of pixels: a copy, for its mode is not to follow the model's
            _become(graph, node, copy.deepcopy(module))
    for node in list(graph.graph.nodes):
        _fork(graph, node)
    graph.graph.lint()
    graph.recompile()
    graph.delete_all_unused_submodules()
    network = Folded(graph, units, model)
    if dtype == torch.bfloat16:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.refresh()
    return network.eval()


def _module(graph: fx.GraphModule, node: fx.Node | None) -> nn.Module | None:
    if node is None or node.op != "call_module":
        return None
    return graph.get_submodule(str(node.target))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _become(graph: fx.GraphModule, node: fx.Node, unit: nn.Module) -> None:
    name = f"unit_{node.name}"
    graph.add_submodule(name, unit)
    node.target = name


def _drop(graph: fx.GraphModule, node: fx.Node, before: fx.Node) -> None:
    """Take a node out; whoever read it reads the one before."""
    node.replace_all_uses_with(before)
    graph.graph.erase_node(node)


def _absorb(graph: fx.GraphModule, node: fx.Node, unit: ConvUnit) -> None:
    """Pull [add ->] relu behind a convolution into its unit, where nobody else reads what lies between."""
    after = _only_user(node)
    added: fx.Node | None = None
    if (
        after is not None
        and after.op == "call_function"
        and after.target in _ADDS
        and len(after.args) == 2
        and not after.kwargs
    ):
        behind = _only_user(after)
        other = after.args[1] if after.args[0] is node else after.args[0]
        if behind is None or not _is_relu(graph, behind) or not isinstance(other, fx.Node) or other is node:
            return
        added, after = after, behind
        order = list(graph.graph.nodes)
        if order.index(other) > order.index(node):  # the shortcut is computed later: move the convolution behind it
            other.append(node)
        _take_relu(graph, after, added, unit)
        added.replace_all_uses_with(node)
        graph.graph.erase_node(added)
        node.args = (node.args[0], other)
        return
    if after is not None and _is_relu(graph, after):
        _take_relu(graph, after, node, unit)


def _fork(graph: fx.GraphModule, node: fx.Node) -> None:
    """Where two read a fused convolution, each gets an output of its own: see fused.py."""
    unit = _module(graph, node)
    if not (isinstance(unit, ConvUnit) and unit.fused and unit.relu and len(node.users) == 2):
        return
    unit.twice = True
    for index, user in enumerate(list(node.users)):
        with graph.graph.inserting_after(node):
            user.replace_input_with(node, graph.graph.call_function(operator.getitem, (node, index)))


def _take_relu(graph: fx.GraphModule, relu: fx.Node, before: fx.Node, unit: ConvUnit) -> None:
    unit.relu = True
    _drop(graph, relu, before)


def _is_relu(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _RELUS
    return isinstance(_module(graph, node), nn.ReLU) or (node.op == "call_method" and node.target == "relu")


Network = Callable[[Tensor], Tensor]
