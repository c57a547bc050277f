"""The model that gradients and queries are taken from: the caller's own, or a bf16 copy made for speed.

The copy lies in channels_last, its batch-norms are folded into the convolutions before them, its convolutions and dense
layers compute in bf16, and its first layer stays in fp32 because bf16 would round a pixel near 1 to 1/256. It serves
to find adversarial examples; what counts is judged by the caller's model (`verdict`). A model that cannot be copied
runs itself under autocast. Works on the CPU too, where it is only slower.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sparring.attacks.setting import Model

Precision = Literal["fp32", "bf16"]
_DENSE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@contextmanager
def frozen(model: Model) -> Iterator[None]:
    """No parameter asks for a gradient, for the time of an attack: FAB calls backward(), which would fill .grad."""
    asking = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def gradient_model(
    model: Model,
    probe: Tensor,
    *,
    precision: Precision,
    fold: bool = True,
    first_in_full: bool = True,
    compiled: bool = False,
) -> Model:
    """What to take gradients from. `model` is in eval mode; `probe` is a few of the images it will see.

    `fold`, `first_in_full` and `compiled` are there to be measured (benchmarks/bench_evaluate.py).
    """
    if precision == "fp32":
        return model
    if not isinstance(model, nn.Module):
        return _autocast(model)
    try:
        twin = copy.deepcopy(model).float()
    except (RuntimeError, TypeError, AttributeError):  # weights that are not leaves, handles that cannot be copied
        return _autocast(model)
    twin.requires_grad_(False)
    probe = probe.float()
    if fold:
        twin = folded(twin, probe)
    twin = _halved(twin, probe, first_in_full=first_in_full)
    if probe.is_cuda and probe.ndim == 4:
        twin = twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fast = _autocast(torch.compile(twin, dynamic=True) if compiled else twin)
    try:  # a model may reach into its layers, and not find there what it expects
        with torch.no_grad():
            fast(probe)
    except (RuntimeError, TypeError, AttributeError):
        return _autocast(model)
    return fast


def _autocast(model: Model) -> Model:
    def logits(x: Tensor) -> Tensor:
        if x.is_cuda and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out = model(x.float())
        return out.to(x.dtype)

    return logits


@torch.no_grad()
def folded(model: nn.Module, probe: Tensor) -> nn.Module:
    """A copy in which a batch-norm that alone reads a convolution is folded into it.

    Which norm reads which convolution is watched on the probe. If something else reads it too (a shortcut), folding
    changes the logits: every fold is tried on the probe, and taken back if it does.
    """
    twin, probe = copy.deepcopy(model), probe[:2]
    names = {module: name for name, module in twin.named_modules()}
    made: dict[int, tuple[nn.Module, Tensor]] = {}  # id of an output -> who made it; holding it keeps the id unique
    pairs: list[tuple[nn.Module, nn.Module]] = []
    calls: dict[nn.Module, int] = {}

    def watch(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, nn.Conv2d):
            made[id(out)] = (module, out)
        elif args and id(args[0]) in made:
            pairs.append((made[id(args[0])][0], module))

    wanted: list[nn.Module] = [module for module in names if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    before = _watched(twin, wanted, watch, probe)
    near = 1e-3 * float(before.abs().max())
    for convolution, norm in pairs:
        assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        if calls[convolution] == calls[norm] == 1 and norm.track_running_stats:
            _replace(twin, names[convolution], fuse_conv_bn_eval(convolution, norm))
            _replace(twin, names[norm], nn.Identity())
            if not torch.allclose(before, twin(probe), rtol=1e-3, atol=near):
                _replace(twin, names[convolution], convolution)
                _replace(twin, names[norm], norm)
    return twin


@torch.no_grad()
def _halved(model: nn.Module, probe: Tensor, *, first_in_full: bool) -> nn.Module:
    """Convolutions and dense layers in bf16, but for the first one called."""
    called: list[nn.Module] = []
    dense: dict[nn.Module, str] = {module: name for name, module in model.named_modules() if isinstance(module, _DENSE)}
    _watched(model, list(dense), lambda module, args, out: called.append(module), probe)
    if not called or dense[called[0]] == "":
        return model
    for module in dense:
        if module is not called[0] and not list(module.children()):
            module.to(torch.bfloat16)
    if first_in_full:
        _replace(model, dense[called[0]], _InFull(called[0]))
    return model


class _InFull(nn.Module):
    """A layer in fp32 within autocast; what it gives is bf16, or the sums after it would all be fp32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.inner(x.float())
        return out.to(torch.bfloat16)


def _watched(
    model: nn.Module, modules: list[nn.Module], hook: Callable[[nn.Module, tuple[Tensor, ...], Tensor], None], x: Tensor
) -> Tensor:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        out: Tensor = model(x)
    finally:
        for handle in handles:
            handle.remove()
    return out


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
