"""Checks of what a caller hands to an attack. Errors come before any gradient is computed and end in the fix."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import torch
from torch import Tensor

from sparring.errors import UserError, unknown

STARTS = ("uniform", "normal")
Model = Callable[[Tensor], Tensor]  # pixels in [0, 1] -> logits of shape (B, classes)


def check_settings(
    *, eps: float, step_size: float, steps: int, loss: object, start: object = None, tau: int = 0, noise: float = 0.0
) -> None:
    """Refuse impossible settings; `start` by name only (`check_start` also takes a tensor)."""
    check_radius("eps", eps)
    check_radius("step_size", step_size)
    if not isinstance(steps, numbers.Integral) or steps < 1:
        raise UserError(f"steps must be a whole number of at least 1, got {steps!r}.")
    if not isinstance(tau, numbers.Integral) or tau < 0:
        raise UserError(f"tau must be a whole number of at least 0, got {tau!r}. tau >= steps is plain PGD.")
    if not math.isfinite(noise) or noise < 0:
        raise UserError(f"noise must be finite and at least 0, got {noise!r}.")
    if start is not None and start not in STARTS:
        raise UserError(f"start must be None, 'uniform' or 'normal', got {start!r}.")
    if not callable(loss) and loss not in ("ce", "kl", "cw"):
        raise unknown("loss", str(loss), ("ce", "kl", "cw"))


def check_radius(name: str, value: float) -> None:
    """Refuse a distance that is no distance in [0, 1] pixels."""
    if not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        given = float(value) if isinstance(value, numbers.Real) else math.nan
        fix = f" For {given:g}/255 write {given:g}/255." if 1 < given <= 255 else ""
        raise UserError(f"{name} must lie in (0, 1], got {value!r}.{fix}")


def check_batch(x: Tensor, y: Tensor) -> None:
    """Refuse images outside [0, 1] and labels that are not one class number per image."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"x must be a floating-point tensor in [0, 1], got {kind}. For uint8 images: x.float() / 255.")
    if x.ndim < 2:
        raise UserError(f"x must be a batch, first dimension the examples, got shape {tuple(x.shape)}.")
    if not isinstance(y, Tensor) or y.dtype != torch.int64:
        kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise UserError(f"y must be an int64 tensor of class numbers, got {kind}. Convert with y.long().")
    if y.shape != x.shape[:1]:
        raise UserError(f"y must hold one label per image: x has {len(x)} images, y has shape {tuple(y.shape)}.")
    if y.device != x.device:
        raise UserError(f"x is on {x.device}, y on {y.device}. Move one: y.to(x.device).")
    if x.numel() == 0:
        return
    _check_pixels("pixels", x, "Divide by 255, and put normalisation into the model (sparring.models.Normalize).")
    if y.min().item() < 0:
        raise UserError(f"labels count from 0, found {int(y.min())}.")


def check_start(start: object, x: Tensor, *, eps: float | None) -> None:
    """Refuse a start that is neither a known name nor one point per image of `x`, in [0, 1] and in its eps-ball.

    A point may lie beyond the ball by rounding. Without `eps` (an attack without projection) the ball is not checked.
    """
    if not isinstance(start, Tensor):
        if start is not None and start not in STARTS:
            raise UserError(f"start must be None, 'uniform' or 'normal', or a tensor of points, got {start!r}.")
        return
    if start.shape != x.shape:
        raise UserError(f"start must have the shape of x, {tuple(x.shape)}, got {tuple(start.shape)}.")
    if start.dtype != x.dtype or start.device != x.device:
        raise UserError(
            f"start must be {x.dtype} on {x.device} as x is, got {start.dtype} on {start.device}. Write start.to(x)."
        )
    if x.numel() == 0:
        return
    _check_pixels("start", start, "Write start.clamp(0, 1).")
    far = (start.detach() - x.detach()).abs().max().item()
    if eps is not None and far > eps + 4 * torch.finfo(x.dtype).eps:
        raise UserError(
            f"start must lie in the eps-ball around x: eps is {eps:g}, found a distance of {far:g}. "
            "Write x + (start - x).clamp(-eps, eps)."
        )


def check_logits(logits: Tensor, x: Tensor, y: Tensor) -> None:
    """Refuse a model whose output cannot be logits for these labels."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x) or logits.shape[1] < 2:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"the model must map {len(x)} images to logits of shape ({len(x)}, classes), got {found}.")
    if len(y) and y.max().item() >= logits.shape[1]:
        raise UserError(f"the model has {logits.shape[1]} classes, found label {int(y.max())}.")


def checked(model: Model, y: Tensor) -> Model:
    """`model`, whose first output is checked to be logits for the labels `y`."""
    unchecked = True

    def predict(x: Tensor) -> Tensor:
        nonlocal unchecked
        logits = model(x)
        if unchecked:
            check_logits(logits, x, y)
            unchecked = False
        return logits

    return predict


def _check_pixels(name: str, x: Tensor, fix: str) -> None:
    low, high = (bound.item() for bound in torch.aminmax(x))  # NaN survives aminmax and fails the comparison
    if not (low >= 0 and high <= 1):
        raise UserError(f"{name} must be finite and lie in [0, 1], found values from {low:g} to {high:g}. {fix}")
