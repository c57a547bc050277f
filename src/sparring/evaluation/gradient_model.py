"""The model that attacks take gradients from: the caller's own, or a bf16 network made from it for speed.

The bf16 network is the engine's: batch-norm is folded into the convolutions, and the first layer reads pixels at 16
bits. It only finds adversarial examples; the caller's model judges them (`verdicts`). A model that cannot be folded, or
whose folded network differs from it on images, runs under autocast. Works on the CPU too, where bf16 is slower.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from sparring.attacks.checks import Model
from sparring.engine.attack.folded import NotFolded, fold, fused_mismatch, mismatch
from sparring.engine.attack.replay import SIZES, ModelItself, Replayed
from sparring.engine.attack_path import on_cuda

GradientPrecision = Literal["fp32", "bf16"]


def gradient_model(
    model: Model, probe: Tensor, *, precision: GradientPrecision, most: int = 0, compiled: bool = False
) -> Model:
    """The model to take gradients from.

    Args:
        model: in eval mode.
        probe: a few of the images it will see.
        precision: of the gradients.
        most: the largest batch it will see.
        compiled: whether to torch.compile the bf16 network.
    """
    if precision == "fp32" or probe.dtype == torch.float64:
        return model
    if not isinstance(model, nn.Module) or _why_not(model, probe):
        return _autocast(model)
    if probe.is_cuda and not compiled:  # fused operations are as fast as compiled ones, without the compile time
        fused = fold(model, dtype=torch.bfloat16, fused=True, fine=True)
        if not fused_mismatch(fused, model, probe.float(), sizes=_sizes(most)):
            return fused if fused.manual is None else Replayed(fused)
    network = fold(model, dtype=torch.bfloat16, fused=False, fine=True)
    try:  # the forward pass of a custom network may not support bf16 or channels_last
        with torch.enable_grad():
            point = probe.float().requires_grad_()
            torch.autograd.grad(network(point).sum(), point)
    except (RuntimeError, TypeError):
        return _autocast(model)
    return torch.compile(network, dynamic=True) if compiled else network


@torch.no_grad()
def query_model(model: Model, gradients: Model, probe: Tensor) -> Model:
    """The model to ask for logits whose small differences matter; `gradients`: from `gradient_model`.

    Where logits come out in bf16, rounded to 8 bits, such differences are lost: the model itself answers.
    """
    logits = gradients(probe)
    rounded = (logits == logits.bfloat16().to(logits.dtype)).double().mean()
    return model if float(rounded) > _ROUNDED else gradients


_ROUNDED = 0.5  # of the logits, from which on they are taken to be; of others 1 in 65,536 is a number in bf16


def _sizes(most: int) -> list[int]:
    """The batch sizes that kernels are compiled for."""
    return [*(size for size in SIZES if size < most), min(most, SIZES[-1])] if most else []


_FEW = (*range(8, 65, 8), *range(80, 257, 16))  # batch sizes at which launches take longer than their kernels


def replayed(model: Model, x: Tensor) -> Model:
    """The model in its own precision for thousands of calls on few images: captured, where it then is the same model.

    The settings of precision at this call are those of all later ones.
    """
    if not isinstance(model, nn.Module) or not on_cuda(x.device) or len(x) > _FEW[-1]:
        return model
    captured = Replayed(ModelItself(model), sizes=_FEW)
    try:
        logits, gradient = _with_gradient(model, x)
        for _ in range(4):  # the third call captures
            again, same = _with_gradient(captured, x)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a model does that cannot be captured
        return model
    pairs = (again, logits), (same, gradient)
    near = all(torch.allclose(ours, own, rtol=0, atol=1e-3 * float(own.abs().max())) for ours, own in pairs)
    return captured if near and captured.made else model


@torch.enable_grad()
def _with_gradient(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of their sum of squares."""
    point = x.detach().clone().requires_grad_()
    logits = model(point)
    return logits.detach(), torch.autograd.grad(logits.square().sum(), point)[0]


def _why_not(model: nn.Module, probe: Tensor) -> str:
    """Why the model is not folded; empty where folding keeps its function, in its own precision on the probe."""
    first = next(model.parameters(), None)
    if first is None or probe.ndim != 4:
        return "it needs weights and images"
    try:
        return mismatch(fold(model, dtype=first.dtype, fused=False), model, probe)
    except NotFolded as error:
        return str(error)


def _autocast(model: Model) -> Model:
    def logits(x: Tensor) -> Tensor:
        if x.is_cuda and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out = model(x.float())
        return out.to(x.dtype)

    return logits
