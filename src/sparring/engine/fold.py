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

_Norm = nn.modules.batchnorm._NormBase  # with statistics, though perhaps without weights
_ADDS: set[Any] = {operator.add, torch.add}
_RELUS: set[Any] = {F.relu, torch.relu}


class _ConvReLU(torch.autograd.Function):
    """relu(conv(x) + bias [+ z]) in one cuDNN call; backward to x and z only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor | None, w: Tensor, b: Tensor, stride: Any, padding: Any) -> Tensor:
        if z is None:
            y: Tensor = torch.cudnn_convolution_relu(x, w, b, stride, padding, (1, 1), 1)
        else:
            y = torch.cudnn_convolution_add_relu(x, w, z, 1.0, b, stride, padding, (1, 1), 1)
        ctx.save_for_backward(x, w, y)
        ctx.conv, ctx.added = (stride, padding), z is not None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        stride, padding = ctx.conv
        gradient = torch.ops.aten.threshold_backward(gradients[0], y, 0)
        of_x = torch.ops.aten.convolution_backward(
            gradient, x, w, None, stride, padding, (1, 1), False, (0, 0), 1, [True, False, False]
        )[0]
        return of_x, gradient if ctx.added else None, None, None, None, None


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
        # bf16 numbers in channels of their own, which keeps 16 bits; the channels are filled up to 8 for alignment.
        self.split = first and dtype == torch.bfloat16
        shape = list(conv.weight.shape)
        if self.split:
            self.inputs = shape[1]
            shape[1] = -(-2 * self.inputs // 8) * 8
        like = conv.weight
        self.register_buffer("weight", torch.zeros(shape, dtype=dtype, device=like.device))
        self.register_buffer("bias", torch.zeros(shape[0], dtype=dtype, device=like.device))
        self.relu, self.fused = False, False

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

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """relu(conv(x) [+ z]), or without the ReLU."""
        if self.split:
            high = x.to(self.weight.dtype)
            low = (x - high.float()).to(self.weight.dtype)
            filling = self.weight.shape[1] - 2 * self.inputs
            x = torch.cat([high, low], dim=1)
            x = F.pad(x, (0, 0, 0, 0, 0, filling)).contiguous(memory_format=torch.channels_last)
        if self.fused and self.relu:
            out: Tensor = _ConvReLU.apply(x, z, self.weight, self.bias, self.stride, self.padding)  # type: ignore[no-untyped-call]
            return out
        out = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        if z is not None:
            out = out + z
        return F.relu(out) if self.relu else out


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

    @property
    def pointwise(self) -> bool:
        """Whether some batch-norm could not be folded and stands alone."""
        return any(isinstance(unit, ScaleShift) for unit in self.units)

    def unfuse(self) -> None:
        """Plain operations throughout, for a compiler to fuse."""
        for unit in self.units:
            if isinstance(unit, ConvUnit):
                unit.fused = False

    def refresh(self) -> None:
        """Take over the model's weights and statistics."""
        for unit in self.units:
            unit.refresh()

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


def _take_relu(graph: fx.GraphModule, relu: fx.Node, before: fx.Node, unit: ConvUnit) -> None:
    unit.relu = True
    _drop(graph, relu, before)


def _is_relu(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _RELUS
    return isinstance(_module(graph, node), nn.ReLU) or (node.op == "call_method" and node.target == "relu")


Network = Callable[[Tensor], Tensor]
