"""`sparring.train`: a recipe by its name, or a configuration, trained into a run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring.engine import EngineKind
from sparring.errors import UserError
from sparring.recipes import find
from sparring.training import loop
from sparring.training.config import Config
from sparring.training.tracking import Tracker


def train(
    recipe: str | Config,
    out: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: torch.device | str = "auto",
    engine: EngineKind = "auto",
    tracker: Tracker | None = None,
    tensorboard: bool = False,
    **changes: Any,
) -> nn.Module:
    """Train into a run folder and return the model of the last epoch (or its average), in eval mode.

    Args:
        recipe: the name of a recipe (`sparring recipes` lists them), or a `Config`.
        out: the run folder. A run that is there is continued with `resume` and replaced with `overwrite`.
        device: "auto" is CUDA where it is, else the CPU.
        engine: "auto" takes captured graphs where CUDA is; "plain" is the reference.
        tracker: called at every step and epoch.
        changes: fields of `Config` to replace, e.g. `epochs=30, seed=3, objective=FAT(tau=2)`.
    """
    name = recipe if isinstance(recipe, str) else ""
    config = find(recipe).config if isinstance(recipe, str) else recipe
    if not isinstance(config, Config):
        raise UserError(f"train takes a recipe's name or a Config, got {config!r}. Write for example 'fat-digits'.")
    unknown = sorted(changes.keys() - vars(config).keys())
    if unknown:
        raise UserError(f"Config has no {unknown[0]!r}. It has: {', '.join(vars(config))}.")
    device = loop.pick_device(str(device))
    return loop.train(
        replace(config, **changes),
        out,
        recipe=name,
        resume=resume,
        overwrite=overwrite,
        device=device,
        engine=engine,
        tracker=tracker,
        tensorboard=tensorboard,
    )
