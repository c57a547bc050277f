"""Checks of a network that the package does not know, on two images, before anything is written.

It must return logits in both modes, every trained parameter must be reached by their gradient, and its state must be
tensors. Weights, statistics, modes and gradients stay as they are. The caller guards the random state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparring.attacks.checks import HALF, check_kind
from sparring.attacks.failures import is_of_shape, quoted, told
from sparring.errors import UserError

_FEW = 3  # names in a message; the rest are counted


def check_network(model: nn.Module, *, num_classes: int, channels: int, size: tuple[int, int]) -> None:
    """Refuse a network that cannot be trained on such images, in one line."""
    what = type(model).__name__
    if isinstance(model, nn.DataParallel):
        raise UserError("the model is a DataParallel. Give the module inside, model.module; several GPUs: torchrun.")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(f"the model ({what}) is compiled by torch.jit. Give the module that it was compiled from.")
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not any(True for _ in model.parameters()):
        raise UserError(f"the model ({what}) has no parameters: there is nothing to train.")
    if not trained:
        raise UserError(f"every parameter of the model ({what}) is frozen. Leave some with requires_grad=True.")
    lazy = [name for name, weight in model.named_parameters() if isinstance(weight, nn.UninitializedParameter)]
    if lazy:
        raise UserError(f"the model ({what}) has lazy layers ({_some(lazy)}). Run it once on a batch first.")
    odd = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise UserError(f"the state of the model ({what}) holds more than tensors ({_some(odd)}), which no run keeps.")
    weight = next(iter(trained.values()))
    if weight.dtype != torch.float32:
        raise UserError(f"the weights of the model ({what}) are {weight.dtype}. Call model.float(); bf16: --precision.")
    x = torch.full((2, channels, *size), 0.5, device=weight.device, dtype=weight.dtype)
    modes = [(module, module.training) for module in model.modules()]
    try:
        for training in (False, True):
            model.train(training)
            where = "" if not training else " in train mode"
            logits = _logits(_run(model, x), num_classes, where, x.device)
        found = torch.autograd.grad(logits.sum(), list(trained.values()), allow_unused=True)
    finally:
        for module, training in modes:
            module.training = training
    unused = [name for name, gradient in zip(trained, found, strict=True) if gradient is None]
    if unused:
        raise UserError(
            f"the model ({what}) never uses {_some(unused)}: no gradient reaches it. Remove what is unused, or freeze "
            "it: parameter.requires_grad_(False)."
        )


def _run(model: nn.Module, x: Tensor) -> object:
    """The output, on copies of the buffers: in train mode statistics move."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.enable_grad():
            return functional_call(model, buffers, (x,))
    except Exception as error:
        if is_of_shape(error):
            raise UserError(
                f"the model ({type(model).__name__}) does not take images of shape {tuple(x.shape[1:])}: "
                f"{quoted(error)}. Build it for this shape, or give other images."
            ) from error
        said = told(error, model, x)
        if said is error:
            raise
        raise said from error


def _logits(found: object, num_classes: int, where: str, device: torch.device) -> Tensor:
    """The output, checked to be logits."""
    wanted = f"the model must return logits (B, {num_classes}){where}, it returned"
    if isinstance(found, tuple | list):
        raise UserError(f"{wanted} a {type(found).__name__} of {len(found)}. Wrap it to return the logits alone.")
    if not isinstance(found, Tensor):
        raise UserError(f"{wanted} {type(found).__name__}. Wrap it to return the logits alone.")
    if found.shape != (2, num_classes):
        raise UserError(f"{wanted} {tuple(found.shape)} for 2 images. Its last layer needs {num_classes} outputs.")
    check_kind(found, device)
    if found.dtype in HALF:
        raise UserError(
            f"the logits of the model are {found.dtype}{where}; the loss is fp32. Return logits.float(), and for speed "
            "train with --precision bf16."
        )
    if not found.requires_grad:
        raise UserError("the logits of the model do not depend on its parameters by a differentiable path.")
    if broken := int((~found.detach().isfinite().all(dim=1)).sum()):
        raise UserError(
            f"logits are not finite for {broken} of 2 grey images{where}. Check the network's weights and its forward "
            "pass."
        )
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
