"""The threat in numbers: the norm, the radius eps, and the length of a step, checked and spread over a batch.

A radius or a length is a number, or a tensor with one number per example or per channel; a step may also be a part of
eps, written "eps/4". Knows no model and no attack.
"""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Sized
from typing import Literal, TypeGuard, get_args

import torch
from torch import Tensor

from sparring.errors import UserError, unknown
from sparring.schedules import Schedule

Norm = Literal["linf", "l2"]
NORMS: tuple[str, ...] = get_args(Norm)
Radius = float | Tensor
StepSize = float | str | Tensor
_PART = re.compile(r"eps(?:/([0-9.eE+-]+))?")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number; True and False are none, nor is one too large for a float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return not isinstance(value, int) or abs(value) <= sys.float_info.max


def check_norm(norm: object) -> None:
    """Refuse a norm that there is not."""
    if not isinstance(norm, str) or norm not in NORMS:
        raise unknown("norm", str(norm), NORMS)


def check_radius(name: str, value: object, norm: str = "linf") -> None:
    """Refuse a distance that is none: in [0, 1] pixels for "linf", of any finite length for "l2"."""
    if isinstance(value, Tensor):
        _check_radii(name, value, norm)
        return
    if isinstance(value, str):
        raise UserError(f"{name} must be a number, got the text {value!r}. Write it without quotes, for example 8/255.")
    if isinstance(value, Schedule):
        raise UserError(f"{name} must be a number, got a schedule ({value}). Give one of its values, such as 8/255.")
    if isinstance(value, Sized):
        raise UserError(
            f"{name} must be one number, got a {type(value).__name__}. pgd and friendly_pgd also take a tensor: "
            f"torch.as_tensor({name})."
        )
    given = float(value) if is_number(value) else math.nan
    if norm == "l2":
        if not 0 < given < math.inf:
            raise UserError(f"{name} must be finite and above 0 (in L2 it may exceed 1), got {value!r}. Write 0.5.")
    elif not 0 < given <= 1:
        fix = f" For {given:g}/255 write {given:g}/255." if 1 < given <= 255 else ""
        longer = " Only an L2 radius may exceed 1: norm='l2'." if given > 1 else ""
        raise UserError(f"{name} must lie in (0, 1], got {value!r}.{fix}{longer}")


def _check_radii(name: str, value: Tensor, norm: str) -> None:
    """Refuse a tensor of distances that are none. Single ones may be 0: nothing moves there."""
    if not value.is_floating_point() or value.numel() == 0:
        raise UserError(f"{name} must be a number or a floating-point tensor, got {value.dtype} of {value.numel()}.")
    low, high = (bound.item() for bound in torch.aminmax(value.detach()))
    most = math.inf if norm == "l2" else 1.0
    if not (low >= 0 and 0 < high <= most and high < math.inf):
        allowed = "be finite and at least 0" if norm == "l2" else "lie in [0, 1]"
        raise UserError(f"{name} must {allowed} and not be 0 throughout, found values from {low:g} to {high:g}.")


def check_step_size(value: object, norm: str = "linf") -> None:
    """Refuse a step that is neither a distance nor a part of eps."""
    if not isinstance(value, str):
        check_radius("step_size", value, norm)
        return
    found = _PART.fullmatch(value.replace(" ", ""))
    try:
        by = float(found[1] or 1) if found else math.nan
    except ValueError:
        by = math.nan
    if not 0 < by < math.inf:
        raise UserError(f"step_size must be a number or a part of eps such as 'eps/4', got {value!r}.")


def refuse_tensors(**lengths: object) -> None:
    """Refuse a tensor or a part of eps where an attack takes plain numbers only."""
    for name, value in lengths.items():
        if isinstance(value, Tensor | str):
            raise UserError(
                f"{name} must be one number here, got {value if isinstance(value, str) else 'a tensor'}. "
                "pgd and friendly_pgd take a tensor, and a step_size such as 'eps/4'."
            )


def part_of_eps(step_size: str) -> float:
    """What a checked part of eps divides eps by: 4 for "eps/4", 1 for "eps"."""
    found = _PART.fullmatch(step_size.replace(" ", ""))
    assert found is not None
    return float(found[1] or 1)


def step_length(step_size: float | str, eps: float) -> float:
    """The length of a step of an attack of radius `eps`."""
    return eps / part_of_eps(step_size) if isinstance(step_size, str) else step_size


def settle(eps: Radius, step_size: StepSize, x: Tensor, norm: Norm) -> tuple[Radius, Radius]:
    """The radius and the step for the batch `x`: numbers, or tensors with one entry per example in dimension 0."""
    radius = _spread("eps", eps, x, norm)
    if isinstance(step_size, str):
        return radius, radius / part_of_eps(step_size)
    return radius, _spread("step_size", step_size, x, norm)


def _spread(name: str, value: Radius, x: Tensor, norm: Norm) -> Radius:
    """`value` with the dimensions of `x`, dimension 0 in full: a tensor of one dimension is one number per example."""
    if not isinstance(value, Tensor):
        return value
    given = tuple(value.shape)
    value = value.detach().to(x)
    if value.ndim == 1 and len(value) == len(x):
        value = value.view(-1, *[1] * (x.ndim - 1))
    elif value.ndim != 1:
        value = value.view(*[1] * (x.ndim - value.ndim), *value.shape)
    fits = value.ndim == x.ndim and all(own in (1, size) for own, size in zip(value.shape, x.shape, strict=True))
    if not fits:
        raise UserError(
            f"{name} of shape {given} does not fit images of shape {tuple(x.shape)}. Write one number per example, "
            f"({len(x)},), or per channel, ({x.shape[1]}, 1, 1)."
        )
    if norm == "l2" and any(size != 1 for size in value.shape[1:]):
        raise UserError(f"{name} must be one number, or one per example, in the L2 norm; got shape {given}.")
    return value.expand(len(x), *value.shape[1:])


def of_rows(value: Radius, rows: Tensor) -> Radius:
    """The radius of the examples number `rows`."""
    return value[rows] if isinstance(value, Tensor) else value
