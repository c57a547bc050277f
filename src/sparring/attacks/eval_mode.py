"""How an attack runs a model: in eval mode, with a generator of its own, for the gradient of the input alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparring.attacks.checks import Model
from sparring.attacks.failures import quoted
from sparring.errors import UserError


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Put the model in eval mode and switch gradients on; on exit restore every submodule's own mode.

    In eval mode batch-norm uses its running statistics, so examples do not influence one another.
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


@contextmanager
def frozen(model: Model) -> Iterator[None]:
    """Switch off the parameters' gradients during an attack: FAB calls backward(), which would fill .grad."""
    asking = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def fresh_generator(x: Tensor) -> torch.Generator:
    """A generator seeded by the operating system: the global random state is neither read nor moved."""
    generator = torch.Generator(device=x.device)
    generator.seed()
    return generator


def input_gradient(loss: Tensor, point: Tensor) -> Tensor:
    """The gradient of each example's loss at its own point. No parameter's .grad is touched."""
    if not loss.requires_grad:
        raise UserError("the loss does not depend on the image by a differentiable path: no gradient to follow.")
    try:
        (gradient,) = torch.autograd.grad(loss.sum(), point)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an operation without a derivative, or a backward pass of the caller's own
        raise UserError(
            f"the backward pass of the model raised {quoted(error)}. Mend the operation that it names, or attack "
            "without gradients."
        ) from error
    return gradient
