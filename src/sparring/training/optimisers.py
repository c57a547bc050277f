"""The optimiser of a run: one of torch's by its name, or one that the caller makes.

A name and its numbers are part of a configuration. What a caller makes is not: a run folder keeps its class's name
(`own:RMSprop`) and its numbers, so that the run is resumed with the same one or not at all. Knows no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sparring.attacks.failures import quoted
from sparring.errors import UserError, unknown

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # gets the trainable parameters
OPTIMIZERS = ("sgd", "adamw", "adam", "rmsprop")
OWN = "own:"
_WRITE = "Write for example optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)."


def check_name(name: str) -> None:
    """Refuse a name that is neither one of torch's known here nor that of a caller's own."""
    if not isinstance(name, str):
        raise UserError(f"optimizer must be a name ({', '.join(OPTIMIZERS)}) in a Config, got {type(name).__name__}.")
    if name not in OPTIMIZERS and not name.startswith(OWN):
        raise unknown("optimizer", name, OPTIMIZERS)


def named(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    no_decay: bool,
) -> torch.optim.Optimizer:
    """One of torch's optimisers, over the model's trainable parameters.

    Args:
        momentum: of sgd and rmsprop; Adam's betas are torch's.
        no_decay: leave biases and the parameters of normalisation, everything of one dimension, without weight decay.
    """
    if name.startswith(OWN):
        raise UserError(
            f"this run has an optimiser of the caller's own ({name.removeprefix(OWN)}), which no file holds. Give it "
            "again from Python: sparring.train(..., optimizer=...)."
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if no_decay:
        wide, narrow = ([p for p in parameters if (p.dim() > 1) == several] for several in (True, False))
        groups = [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]
    numbers: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if name == "adamw":
        return torch.optim.AdamW(groups, **numbers)
    if name == "adam":
        return torch.optim.Adam(groups, **numbers)
    if name == "rmsprop":
        return torch.optim.RMSprop(groups, momentum=momentum, **numbers)
    return torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov, **numbers)


def own(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """What the caller's function makes of the model's trainable parameters, checked to hold these and no others."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        optimizer = make(list(parameters.values()))
    except Exception as error:
        raise UserError(
            f"the optimiser cannot be made of the model's parameters ({quoted(error)}). {_WRITE}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer must return a torch optimiser, got {type(optimizer).__name__}. {_WRITE}")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held - {id(parameter) for parameter in model.parameters()}:
        raise UserError(f"the optimiser holds parameters that are not the model's. {_WRITE}")
    left = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if left:
        raise UserError(
            f"the optimiser leaves out {len(left)} of the model's {len(parameters)} trainable parameters "
            f"({left[0]}{', ...' if len(left) > 1 else ''}). Give it all, or freeze these: requires_grad_(False)."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError("SparseAdam takes sparse gradients only, and a network's are dense. Use torch.optim.Adam.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "LBFGS evaluates the loss several times a step, which the loop does not. Use another optimiser."
        )
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not rates[0] > 0:
        raise UserError(f"the optimiser's first group must have a positive lr, got {rates[0]:g}: schedules scale it.")
    return optimizer


def check_callable(optimizer: object) -> None:
    """Refuse what cannot make an optimiser, an optimiser itself among it."""
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise UserError(f"optimizer must be a name or a function of the parameters, got {_said(optimizer)}. {_WRITE}")


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of every parameter group, as plain JSON."""
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(_plain(value))}
        for group in optimizer.param_groups
    ]


def differences(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, where the settings of two optimisers differ."""
    if len(before) != len(after):
        return [f"{len(before)} parameter groups -> {len(after)}"]
    return [
        f"{name} {one[name]} -> {other[name]}"
        for one, other in zip(before, after, strict=True)
        for name in one
        if name in other and one[name] != other[name]
    ]


def _said(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.optim.Optimizer) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
