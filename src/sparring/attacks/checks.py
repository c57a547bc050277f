"""Checks of what a caller hands to an attack. Errors come before any gradient is computed and end in the fix."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sparring.attacks.failures import check_values, told
from sparring.attacks.threat import Norm, Radius, check_norm, check_radius, check_step_size, is_number
from sparring.errors import UserError, unknown

STARTS = ("uniform", "normal")
HALF = (torch.float16, torch.bfloat16)
Model = Callable[[Tensor], Tensor]  # pixels in [0, 1] -> logits of shape (B, classes)
# (gradient at the logits, places in the forward pass or None for all) -> gradient at the pixels, of as many examples
Back = Callable[[Tensor, Tensor | None], Tensor]


@runtime_checkable
class TwoPasses(Protocol):
    """A model that also runs without autograd, so that its backward pass can be that of fewer examples."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Logits, with autograd."""

    def forward_back(self, x: Tensor) -> tuple[Tensor, Back]:
        """Logits without a graph, and the backward pass."""


class NotFinite(UserError):
    """A model whose logits are NaN or infinite: there is nothing to attack."""


def check_settings(
    *,
    eps: object,
    step_size: object,
    steps: object,
    loss: object,
    start: object = None,
    tau: object = 0,
    noise: object = 0.0,
    norm: str = "linf",
) -> None:
    """Refuse impossible settings; `start` by name only (`check_start` also takes a tensor)."""
    check_norm(norm)
    check_radius("eps", eps, norm)
    check_step_size(step_size, norm)
    if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 1:
        raise UserError(f"steps must be a whole number of at least 1, got {steps!r}.")
    if not isinstance(tau, numbers.Integral) or isinstance(tau, bool) or tau < 0:
        raise UserError(f"tau must be a whole number of at least 0, got {tau!r}. tau >= steps is plain PGD.")
    check_not_negative("noise", noise)
    if start is not None and (not isinstance(start, str) or start not in STARTS):
        found = repr(start) if isinstance(start, str | int | float) else f"a {type(start).__name__}"
        raise UserError(f"start must be None, 'uniform' or 'normal', got {found}.")
    if not callable(loss) and loss not in ("ce", "kl", "cw"):
        raise unknown("loss", str(loss), ("ce", "kl", "cw"))
    if callable(loss) and not _takes_two(loss):
        raise UserError("a loss of your own must take (logits, y) and give one value per example.")


def _takes_two(function: Callable[..., object]) -> bool:
    """Whether a function takes two positional arguments, as far as it can be asked."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def check_model(model: object) -> None:
    """Refuse what is no model: a name, a class, an optimiser."""
    if isinstance(model, type):
        raise UserError(f"model is the class {model.__name__}. Give a network of it: {model.__name__}(...).")
    if isinstance(model, str):
        raise UserError(f"model is the text {model!r}. Load it first: sparring.load_model({model!r}).")
    if not callable(model):
        raise UserError(
            f"model must map images to logits, an nn.Module or a function, got {type(model).__name__}. Load one with "
            "sparring.load_model."
        )
    check_values(model)


def check_generator(generator: object) -> None:
    """Refuse anything but a generator of torch, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UserError(
            f"generator must be a torch.Generator or None, got {type(generator).__name__}. Write "
            "torch.Generator().manual_seed(0)."
        )


def check_not_negative(name: str, value: object) -> None:
    """Refuse anything but a finite number of at least 0."""
    if not is_number(value) or not 0 <= float(value) < math.inf:
        fix = "" if is_number(value) else " Give a number."
        raise UserError(f"{name} must be finite and at least 0, got {value!r}.{fix}")


def check_images(x: object) -> None:
    """Refuse anything but a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        if isinstance(x, DataLoader):
            raise UserError("x must be one batch of images, got a DataLoader. Loop over it: for x, y in loader: ...")
        fix = "For uint8 images: x.float() / 255." if isinstance(x, Tensor) else "Write torch.as_tensor(x)."
        raise UserError(f"x must be a floating-point tensor in [0, 1], got {kind}. {fix}")


def check_batch(x: Tensor, y: Tensor) -> None:
    """Refuse images outside [0, 1] and labels that are not one class number per image."""
    check_images(x)
    if x.ndim < 2:
        raise UserError(f"x must be a batch, first dimension the examples, got shape {tuple(x.shape)}.")
    if not isinstance(y, Tensor) or y.dtype != torch.int64:
        kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
        fix = "Convert with y.long()." if isinstance(y, Tensor) else "Write torch.as_tensor(y).long()."
        raise UserError(f"y must be an int64 tensor of class numbers, got {kind}. {fix}")
    if y.shape != x.shape[:1]:
        fix = "Of one-hot labels give y.argmax(1)." if y.ndim == 2 and len(y) == len(x) else "Give as many of both."
        raise UserError(f"y must hold one label per image: x has {len(x)} images, y has shape {tuple(y.shape)}. {fix}")
    if y.device != x.device:
        raise UserError(f"x is on {x.device}, y on {y.device}. Move one: y.to(x.device).")
    if x.numel() == 0:
        return
    _check_pixels("pixels", x, "Divide by 255, and put normalisation into the model (sparring.models.Normalize).")
    if y.min().item() < 0:
        raise UserError(f"labels count from 0, found {int(y.min())}. Leave such images out, or number them anew.")


def check_start(start: object, x: Tensor, *, eps: Radius | None, norm: Norm = "linf") -> None:
    """Refuse a start that is neither a known name nor one point per image of `x`, in [0, 1] and in its eps-ball.

    A point may lie beyond the ball by rounding. Without `eps` (an attack without projection) the ball is not checked.
    """
    if not isinstance(start, Tensor):
        if start is not None and (not isinstance(start, str) or start not in STARTS):
            found = repr(start) if isinstance(start, str | int | float) else type(start).__name__
            raise UserError(f"start must be None, 'uniform' or 'normal', or a tensor of points, got {found}.")
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
    if eps is None:
        return
    shift = (start.detach() - x.detach()).abs()
    if norm == "l2":
        shift = torch.linalg.vector_norm(shift, dim=tuple(range(1, x.ndim)), keepdim=True)
    slack = (4 if norm == "linf" else 4 * x[0].numel() ** 0.5) * torch.finfo(x.dtype).eps
    if bool((shift > eps + slack).any()):
        given = f"eps is {eps:g}, " if not isinstance(eps, Tensor) else ""
        fix = "Write x + (start - x).clamp(-eps, eps)." if norm == "linf" else "Shorten start - x to a length of eps."
        raise UserError(
            f"start must lie in the eps-ball around x: {given}found a distance of {shift.max().item():g}. {fix}"
        )


def check_logits(logits: Tensor, x: Tensor, y: Tensor) -> None:
    """Refuse a model whose output cannot be logits for these labels."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x) or logits.shape[1] < 2:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        fix = "" if isinstance(logits, Tensor) else " Wrap it to return the logits alone."
        raise UserError(f"the model must map {len(x)} images to logits of shape ({len(x)}, classes), got {found}.{fix}")
    check_kind(logits, x.device)
    check_labels(y, logits.shape[1])


def check_kind(logits: Tensor, device: torch.device) -> None:
    """Refuse logits that are not real floating-point numbers on the device of the images."""
    if logits.device != device:
        raise UserError(
            f"the model's logits are on {logits.device}, its images on {device}. Return logits.to(x.device)."
        )
    if logits.is_floating_point():
        return
    fix = "its real part, logits.real" if logits.is_complex() else "the scores before argmax, comparison or rounding"
    raise UserError(f"the model's logits are {logits.dtype}, where floating-point numbers are needed. Return {fix}.")


def check_labels(y: Tensor, classes: int) -> None:
    """Refuse labels that a model of `classes` classes does not have."""
    if len(y) == 0 or y.max().item() < classes:
        return
    low, high = int(y.min()), int(y.max())
    if low == 1 and high == classes:
        raise UserError(
            f"labels run from 1 to {high}, the model has {classes} classes numbered 0 to {classes - 1}: subtract 1."
        )
    raise UserError(f"the model has {classes} classes, found label {high}. Labels lie in 0 to {classes - 1}.")


def not_finite(logits: Tensor) -> str:
    """'logits are not finite for 3 of 50 images', or an empty string where all are."""
    broken = int((~logits.detach().isfinite().all(dim=1)).sum())
    return f"logits are not finite for {broken} of {len(logits)} images" if broken else ""


def checked(model: Model, y: Tensor) -> Model:
    """`model`, whose first output is checked to be finite logits for the labels `y`, and whose failures are told.

    Logits in half precision are converted: the loss, its gradient and the comparison of classes are float32.
    """
    first = _Checked(model, y)
    return _CheckedPasses(model, first) if isinstance(model, TwoPasses) else first


class _Checked:
    """A model whose first output is checked."""

    def __init__(self, model: Model, y: Tensor) -> None:
        self.model, self.y, self.unchecked = model, y, True

    def __call__(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.check(call(self.model, x), x)

    def check(self, logits: Tensor, x: Tensor) -> Tensor:
        """The logits, refused where the first ones are none."""
        if self.unchecked:
            check_logits(logits, x, self.y)
            if broken := not_finite(logits):
                raise NotFinite(f"{broken}. Check the model's weights: its training may have diverged.")
            self.unchecked = False
        return logits.float() if logits.dtype in HALF else logits


class _CheckedPasses:
    """The same of a model in two passes."""

    def __init__(self, model: TwoPasses, first: _Checked) -> None:
        self.model, self.first = model, first

    def __call__(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.first(x)

    def forward_back(self, x: Tensor) -> tuple[Tensor, Back]:
        """Logits, and the backward pass."""
        logits, back = self.model.forward_back(x)
        return self.first.check(logits, x), back


def call(model: Model, x: Tensor) -> Tensor:
    """The model's output; where it fails, an error of one line (`failures.told`)."""
    try:
        return model(x)
    except Exception as error:
        said = told(error, model, x)
        if said is error:
            raise
        raise said from error


def check_target(target: object, y: Tensor, loss: object) -> Tensor | None:
    """The class that each image is led to, one int64 per image; None for an attack without a target."""
    if target is None:
        return None
    if loss == "kl":
        raise UserError("a target needs a loss towards a class: 'ce' or 'cw', got loss 'kl'.")
    if isinstance(target, numbers.Integral) and not isinstance(target, bool) and int(target) >= 0:
        return torch.full_like(y, int(target))
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.shape != y.shape:
        found = f"{target.dtype} of shape {tuple(target.shape)}" if isinstance(target, Tensor) else repr(target)
        raise UserError(f"target must be a class number, or an int64 tensor of {len(y)} of them, got {found}.")
    if len(target) and target.min().item() < 0:
        raise UserError(f"classes count from 0, found target {int(target.min())}.")
    return target.to(y.device)


def _check_pixels(name: str, x: Tensor, fix: str) -> None:
    low, high = (bound.item() for bound in torch.aminmax(x))  # NaN survives aminmax
    if not (math.isfinite(low) and math.isfinite(high)):
        broken = int((~x.detach().isfinite()).sum())
        raise UserError(
            f"{name} must be finite and lie in [0, 1], found {broken} of {x.numel()} values NaN or infinite. "
            "Look at the data, and at what is computed from them before this call."
        )
    if not (low >= 0 and high <= 1):
        if name == "pixels" and low >= 0 and 1 < high <= 255:
            fix = "They look like pixels from 0 to 255. Divide by 255: x / 255."
        raise UserError(f"{name} must be finite and lie in [0, 1], found values from {low:g} to {high:g}. {fix}")
