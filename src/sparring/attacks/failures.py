"""What it means that a model fails when it is called: one line with what it raised, and the cause where that is known.

Torch's own words for a shape that does not fit are recognised, weights of another precision than the images, and
parameters on several devices. Any other exception is the model's own: it is quoted, and no cause is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparring.errors import RunFailed, UserError
from sparring.files.regular import shown

_LONGEST = 200  # characters of an exception's text in a message
# How torch and timm say that a tensor does not have the shape a layer needs.
_SHAPE = re.compile(
    r"shapes cannot be multiplied|expected input\b.*\bchannels|number of channels in input|is invalid for input of size"
    r"|must match the (existing )?size|sizes of tensors must match|expected input with shape|expected input's size"
    r"|kernel size can't be greater|output size is too small|should contain \d+ elements|should be less than the "
    r"corresponding input dimension|don't multiply up to the size|expected \d+D|batched \dD|dimension out of range"
    r"|number of dimensions|size does not match|equal to input_size|expected size for|doesn't match model",
    re.IGNORECASE,
)
# How torch says that a forward pass is not one that gradients can follow.
_NO_GRADIENT = re.compile(r"can't call numpy\(\) on tensor that requires grad|a leaf variable that requires grad", re.I)


def told(error: Exception, model: object, x: Tensor) -> Exception:
    """The error to raise where calling `model` on the images `x` raised `error`; what says its own fix stays itself."""
    if isinstance(error, UserError | RunFailed | torch.OutOfMemoryError):
        return error
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    if scattered := _devices(weights):
        return UserError(f"{scattered}, and it fails ({quoted(error)}). Move all to one: model.to({str(x.device)!r}).")
    others = [weight.dtype for weight in weights if weight.is_floating_point() and weight.dtype != x.dtype]
    if others and isinstance(error, RuntimeError):
        return UserError(
            f"the images are {x.dtype}, the model's weights {others[0]}. Give both the same: x.to({others[0]})."
        )
    if isinstance(error, RuntimeError) and _NO_GRADIENT.search(str(error)):
        return UserError(
            f"the model cannot be differentiated ({quoted(error)}). Take NumPy and in-place changes out of its forward "
            "pass."
        )
    shape = tuple(x.shape[1:])
    if is_of_shape(error):
        return UserError(
            f"the model does not accept images of shape {shape} ({quoted(error)}). Give the data set it was trained on."
        )
    images = f"{len(x)} image{'' if len(x) == 1 else 's'} of shape {shape}"
    return UserError(
        f"the model raised {quoted(error)}, on {images}. Call model(x) on such images to see where, and mend it there."
    )


def is_of_shape(error: Exception) -> bool:
    """Whether an exception says that a tensor does not have the shape that a layer needs."""
    of_torch = isinstance(error, RuntimeError | ValueError | IndexError | AssertionError)
    return of_torch and _SHAPE.search(str(error)) is not None


def quoted(error: BaseException) -> str:
    """An exception as it may stand in a message of one line: its type, and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {shown(lines[0].rstrip('.'), _LONGEST)}" if lines else type(error).__name__


def check_values(model: object) -> None:
    """Refuse a model with parameters on the meta device: they have a shape and no values."""
    if not isinstance(model, nn.Module):
        return
    empty = [name for name, weight in model.named_parameters() if weight.is_meta]
    if empty:
        raise UserError(
            f"{len(empty)} parameters of the model are on the meta device, without values, the first {shown(empty[0])}"
            ". Call model.to_empty(device='cpu') and load its weights."
        )


def _devices(weights: Sequence[Tensor]) -> str:
    """'the model's parameters are on cuda:0 and cuda:1', or an empty string where they are on one device."""
    names = sorted({str(weight.device) for weight in weights})
    return f"the model's parameters are on {' and '.join(names)}" if len(names) > 1 else ""
