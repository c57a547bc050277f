"""What an optimiser remembers, as tensors by parameter and name and as plain numbers: for checkpoints.

Tensors are kept as `optimizer.KEY.PARAMETER`, e.g. `optimizer.exp_avg.conv1.weight`; numbers and the settings of the
groups, which some optimisers change as they go, among the facts. No object of the optimiser is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparring.errors import UserError
from sparring.training.optimisers import differences, numbers

_PART = "optimizer"
_RATES = ("lr", "initial_lr")  # set by the schedule at every step


def tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The tensors that an optimiser keeps."""
    return {
        f"{_PART}.{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def facts(optimizer: torch.optim.Optimizer, model: nn.Module, made: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The rest, as plain JSON. `made`: the settings that a caller's own optimiser began with; None for a named one."""
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                continue
            if value is not None and not isinstance(value, bool | int | float | str):
                raise UserError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({key}) for every parameter, and a "
                    "checkpoint holds tensors and numbers. Use another optimiser, or a loop of your own."
                )
            values.setdefault(name, {})[key] = value
    return {"made": made, "groups": numbers(optimizer), "values": values}


def restore(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    kept: dict[str, Tensor],
    known: dict[str, Any],
    made: list[dict[str, Any]] | None,
) -> None:
    """Continue as saved: `kept` are the tensors by `KEY.PARAMETER`, `known` the facts.

    Raises:
        UserError: a caller's own optimiser has other settings than the run began with.
    """
    if made is not None and known.get("made") is not None and (changed := differences(known["made"], made)):
        raise UserError(f"the run was started with another optimiser ({'; '.join(changed)}). Give the one it had.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for path, tensor in kept.items():
        key, _, name = path.partition(".")
        found.setdefault(name, {})[key] = tensor.cpu() if key == "step" else tensor  # torch moves it where it counts
    for name, values in known.get("values", {}).items():
        found.setdefault(name, {}).update(values)
    groups, state, place = [], {}, 0
    settings = known.get("groups") or [{} for _ in optimizer.param_groups]
    if len(settings) != len(optimizer.param_groups):
        raise UserError(
            "the checkpoint has another number of parameter groups than the optimiser. Give the one it had."
        )
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        own = {key: _like(group.get(key), value) for key, value in saved.items() if key not in _RATES}
        groups.append({**group, **own, "params": list(range(place, place + len(group["params"])))})
        for parameter in group["params"]:
            if names.get(id(parameter)) in found:
                state[place] = found[names[id(parameter)]]
            place += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in found.get(names.get(id(parameter), ""), {}).items():
                loaded = optimizer.state[parameter].get(key)
                if isinstance(value, Tensor) and loaded.dtype != value.dtype:  # torch casts to the parameter's
                    optimizer.state[parameter][key] = value.to(loaded.device)


def _like(present: Any, saved: Any) -> Any:
    """A saved setting as the group has it: JSON has no tuples, and an lr or a beta may be a tensor."""
    if isinstance(present, Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(saved, list) and not isinstance(present, list) else saved
