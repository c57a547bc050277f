"""What every attack shares: checked input, a quiet model, an inner loss, the gradient of the input.

Errors are raised before any gradient is computed and end in the fix. Nothing here decides where an attack walks.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from sparring.attacks import losses
from sparring.errors import UserError, unknown

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]  # (logits, y) -> one loss per example
Loss = Literal["ce", "kl", "cw"] | PerExampleLoss
Model = Callable[[Tensor], Tensor]


def check_settings(
    *, eps: float, step_size: float, steps: int, loss: Loss, start: str | None, tau: int = 0, noise: float = 0.0
) -> None:
    """Refuse impossible settings."""
    check_radius("eps", eps)
    check_radius("step_size", step_size)
    if not isinstance(steps, numbers.Integral) or steps < 1:
        raise UserError(f"steps must be a whole number of at least 1, got {steps!r}.")
    if not isinstance(tau, numbers.Integral) or tau < 0:
        raise UserError(f"tau must be a whole number of at least 0, got {tau!r}. tau >= steps is plain PGD.")
    if not math.isfinite(noise) or noise < 0:
        raise UserError(f"noise must be finite and at least 0, got {noise!r}.")
    if start not in (None, "uniform", "normal"):
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
    """Refuse images or labels that no model could have been meant to see."""
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
    low, high = (bound.item() for bound in torch.aminmax(x))  # NaN survives aminmax and fails the comparison
    if not (low >= 0 and high <= 1):
        raise UserError(
            f"pixels must be finite and lie in [0, 1], found values from {low:g} to {high:g}. "
            "Divide by 255, and put normalisation into the model (sparring.models.Normalize)."
        )
    if y.min().item() < 0:
        raise UserError(f"labels count from 0, found {int(y.min())}.")


def check_logits(logits: Tensor, x: Tensor, y: Tensor) -> None:
    """Refuse a model whose output cannot be logits for these labels."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x) or logits.shape[1] < 2:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"the model must map {len(x)} images to logits of shape ({len(x)}, classes), got {found}.")
    if len(y) and y.max().item() >= logits.shape[1]:
        raise UserError(f"the model has {logits.shape[1]} classes, found label {int(y.max())}.")


@contextmanager
def quiet(model: Model) -> Iterator[None]:
    """Eval mode, with gradients on, for the time of an attack; then every submodule's own mode again.

    Eval mode makes batch-norm use its running statistics, so that examples do not see one another.
    """
    modes = {module: module.training for module in model.modules()} if isinstance(model, nn.Module) else {}
    try:
        for module in modes:
            module.training = False
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def fresh_generator(x: Tensor) -> torch.Generator:
    """A generator seeded by the operating system: the global random state is neither read nor moved."""
    generator = torch.Generator(device=x.device)
    generator.seed()
    return generator


class InnerLoss:
    """The loss an attack climbs. "kl" remembers the clean prediction, computed once."""

    def __init__(self, loss: Loss, model: Model, x: Tensor) -> None:
        self.loss = loss
        self.natural: Tensor | None = None
        if loss == "kl":
            with torch.no_grad():
                self.natural = model(x)

    def keep(self, rows: Tensor) -> None:
        """Forget every example but these."""
        if self.natural is not None:
            self.natural = self.natural[rows]

    def __call__(self, logits: Tensor, y: Tensor, rows: Tensor | None = None) -> Tensor:
        """Losses of shape (B,); `rows` says which remembered examples these are, where not all."""
        if self.natural is not None:
            return losses.kl(self.natural if rows is None else self.natural[rows], logits)
        if self.loss == "ce":
            return losses.cross_entropy(logits, y)
        if self.loss == "cw":
            return losses.margin(logits, y)
        assert callable(self.loss)
        values = self.loss(logits, y)
        if not isinstance(values, Tensor) or values.shape != y.shape:
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(f"the loss must give one value per example, shape {tuple(y.shape)}, got {found}.")
        return values


def input_gradient(losses_: Tensor, point: Tensor) -> Tensor:
    """The gradient of each example's loss at its own point. No parameter's .grad is touched."""
    if not losses_.requires_grad:
        raise UserError("the loss does not depend on the image by a differentiable path: no gradient to follow.")
    (gradient,) = torch.autograd.grad(losses_.sum(), point)
    return gradient
