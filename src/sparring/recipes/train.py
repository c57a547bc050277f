"""`sparring.train`: a recipe by its name, a configuration, or the caller's own network, trained into a run folder."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring import models, weights
from sparring.data import Dataset, Passing, as_dataset, load
from sparring.engine import EngineKind
from sparring.errors import UserError, did_you_mean
from sparring.models.own import Make, is_import_path
from sparring.objectives import OBJECTIVES, Objective
from sparring.recipes import find
from sparring.training import loop, run_folder, torchrun
from sparring.training.advice import notes
from sparring.training.config import Config, unused
from sparring.training.distributed import joined, pick_device
from sparring.training.optimisers import OWN, MakeOptimizer, check_callable
from sparring.training.progress import TrainingBar
from sparring.training.resume import finished
from sparring.training.signals import by_ctrl_c, stopping
from sparring.training.trackers import Trackers

_log = logging.getLogger("sparring")


def train(
    recipe: str | Config | None = None,
    out: Path | str | None = None,
    *,
    objective: Objective | None = None,
    model: nn.Module | Make | str | None = None,
    data: Any = None,
    init: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: torch.device | str = "auto",
    engine: EngineKind = "auto",
    deterministic: bool = False,
    tracker: Trackers = None,
    progress: bool = True,
    tensorboard: bool = False,
    optimizer: str | MakeOptimizer | None = None,
    **changes: Any,
) -> nn.Module:
    """Train into a run folder and return the model of the last epoch (or its average), in eval mode.

    Args:
        recipe: the name of a recipe (`sparring recipes` lists them), or a `Config`. None: the run in `out` with
            `resume`, else what you give of objective, model and data, and the defaults of `Config`.
        out: the run folder. A run that is there is continued with `resume` and replaced with `overwrite`.
        resume: continue the run in `out`. Where there is none, recipe, objective or data begin one, as a note says.
        objective: what is minimised, e.g. FAT(tau=2), in place of the recipe's.
        model: a network of the caller's own, from pixels in [0, 1] to logits: a module, of which a copy is trained from
            the weights it has; a function or class that makes it; or a name (built in, registered, package.module:make,
            timm:NAME).
        data: your own: tensors or arrays (x, y), a torch Dataset, a DataLoader, a data set's name, or (train, test) of
            these. Images are uint8, or floats in [0, 1]; normalisation belongs into the model.
        init: a run folder, .safetensors or published file whose weights training begins from. A head for another number
            of classes is replaced.
        device: "auto" is CUDA where it is, else the CPU.
        engine: "auto" takes captured graphs where CUDA is; "plain" is the reference.
        deterministic: on CUDA, take only algorithms that give the same bits every time, none of them chosen by timing.
            On a CPU a run is repeated bit for bit without it.
        tracker: a name (csv, tensorboard, wandb, trackio), an object called at every step and epoch, or several.
        progress: whether to show a bar on standard error (without a terminal, a line per epoch), and before it notes on
            settings that are probably not intended.
        optimizer: a name (sgd, adamw, adam, rmsprop), or a function that makes an optimiser from the list of trainable
            parameters, e.g. `lambda p: torch.optim.AdamW(p, lr=1e-3)`. Of a function's, the learning rate stays as it
            is unless `lr` is given; a schedule is then the first parameter group's, and others keep their ratio to it.
        changes: fields of `Config` to replace, e.g. `epochs=30, seed=3`. With `resume`, more epochs make a run longer.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the step is done and the run is saved; a second Ctrl-C raises it at once.
        SystemExit: after SIGTERM or SIGHUP, in the same way. Other threads than the main one get no signals.
    """
    if not isinstance(out, str | Path):
        raise UserError(f"out must be the path of the run folder, got {out!r}. Write for example out='runs/a'.")
    flags = {"resume": resume, "overwrite": overwrite, "deterministic": deterministic}
    for flag, value in (flags | {"progress": progress, "tensorboard": tensorboard}).items():
        if type(value) is not bool:
            raise UserError(f"{flag} must be True or False, got {value!r}.")
    if resume and overwrite:
        raise UserError("resume continues a run and overwrite replaces it. Give one of them.")
    goes_on = resume and (Path(out) / run_folder.CONFIG).exists()
    if resume and not goes_on and all(part is None for part in (recipe, objective, data)):
        raise UserError(
            f"{out} holds no run (no {run_folder.CONFIG} in it). Check the path, or begin one with a recipe, "
            "objective= or data=."
        )
    if not goes_on and all(part is None for part in (recipe, objective, model, data)):
        raise UserError(
            "nothing says what to train. Give a recipe, for example 'fat-digits', or objective=, model=, data=."
        )
    name, config = _base(recipe, Path(out), resume=resume)
    if isinstance(model, str):
        models.name_model(model)
    elif model is not None and not callable(model):
        raise UserError(
            f"model must be an nn.Module, what makes one, or a name, got {type(model).__name__}. Write for example "
            "model=net."
        )
    if init is not None and not isinstance(init, str | Path):
        raise UserError(f"init must be the path of a run or a file, got {type(init).__name__}. Save the weights first.")
    given = {"objective": objective, "init": init if init is None else str(init)}
    given["model"] = model if model is None or isinstance(model, str) else models.own_name(model)
    changes |= {key: value for key, value in given.items() if value is not None}
    if isinstance(optimizer, str):
        changes, optimizer = changes | {"optimizer": optimizer}, None
    if optimizer is not None:
        check_callable(optimizer)
        if idle := [name for name in unused(OWN) if name in changes]:
            raise UserError(
                f"{idle[0]} is a number of the optimisers by name, and yours has its own. Give it there: "
                f"optimizer=lambda p: torch.optim.AdamW(p, ...)."
            )
    unknown = sorted(changes.keys() - vars(config).keys())
    if unknown:
        if unknown[0] in {field.name for kind in OBJECTIVES.values() for field in fields(kind)}:
            raise UserError(
                f"{unknown[0]} is a parameter of the objective. Write for example objective=FAT({unknown[0]}="
                f"{changes[unknown[0]]!r})."
            )
        near = did_you_mean(unknown[0], (*vars(config), *inspect.signature(train).parameters))
        raise UserError(f"train and Config have no {unknown[0]!r}.{near} Config has: {', '.join(vars(config))}.")
    where: dict[str, Any] = {"device": str(device), "engine": str(engine)}  # a run folder keeps neither
    where |= {"deterministic": deterministic} if deterministic else {}
    device = pick_device(str(device))
    images: Dataset | None = None
    if data is not None:
        images, changes = _own(data, changes)
    if not getattr(changes.get("objective"), "radius", 1) and config.validation_eps == "eps":
        changes.setdefault("validation_eps", config.validation_radius)  # a part of eps means nothing without an attack
    wanted = replace(config, **changes)
    own_lr = "lr" not in changes and not config.optimizer.startswith(OWN) and (bool(name) or config.lr == Config.lr)
    images = images or load(wanted.data)
    if progress and torchrun.rank() == 0 and not (resume and finished(Path(out), wanted)):
        for note in notes(wanted if optimizer is None else _without_its_own(wanted, own_lr=own_lr), images, device):
            print(f"note: {note}", file=sys.stderr)
    with joined(device) as world, stopping() as stop:
        if resume and not goes_on and world.first:
            _log.warning(f"{out} held no run to resume: a new one begins.")
        ours = world.began(Path(out))  # a restart by torchrun continues what these processes began, and nothing else
        resume, overwrite = resume or ours, overwrite and not ours
        try:
            trained = loop.train(
                wanted,
                out,
                data=images,
                recipe=name,
                resume=resume,
                overwrite=overwrite,
                device=device,
                model=None if isinstance(model, str) else model,
                initial=weights.initial,
                renewed={"attack" if key == "objective" else key for key in changes},
                say=_log.warning,
                engine=engine,
                deterministic=deterministic,
                tracker=_followed(tracker, progress=progress),
                tensorboard=tensorboard,
                optimizer=optimizer,
                own_lr=own_lr,
                stop=stop,
                world=world,
            )
        except loop.Interrupted as interrupted:
            again = _again(out, wanted, where, own_optimizer=optimizer is not None)
            raise _stopped(f"{interrupted}. Continue with {again}") from None
    if stop():  # in the last validation: the run has ended, what follows it in the caller's program has not begun
        raise _stopped(f"stopped; the run is finished. Load it with sparring.load_model({str(out)!r})")
    return trained


def _without_its_own(config: Config, *, own_lr: bool) -> Config:
    """The configuration without the optimiser, or the learning rate, that the caller's own optimiser replaces."""
    return replace(config, optimizer=f"{OWN}optimizer", nesterov=False, lr=Config.lr if own_lr else config.lr)


def _stopped(message: str) -> BaseException:
    """What a stopped run raises: KeyboardInterrupt after Ctrl-C; else SystemExit, which prints the message."""
    return KeyboardInterrupt(message) if by_ctrl_c() else SystemExit(f"sparring: {message}")


def _again(out: Path | str, config: Config, where: Mapping[str, Any], *, own_optimizer: bool) -> str:
    """The call that continues a run; what was handed in and the run folder cannot hold is written as `...`."""
    words = [f"out={str(out)!r}", "resume=True"]
    words += [f"model={str(config.model)!r}"] if is_import_path(config.model) else []
    words += [f"{name}=..." for name in ("model", "data") if getattr(config, name).startswith(OWN)]
    words += ["optimizer=..."] if own_optimizer else []
    words += [f"{name}={value!r}" for name, value in where.items() if value != "auto"]
    return f"sparring.train({', '.join(words)})"


def _base(recipe: str | Config | None, out: Path, *, resume: bool) -> tuple[str, Config]:
    """The recipe's name and the configuration that changes apply to."""
    if recipe is None:
        if resume and (out / run_folder.CONFIG).exists():
            run = run_folder.open_run(out)
            return run.recipe, run.config
        return "", Config()
    if isinstance(recipe, str):
        return recipe, find(recipe).config
    if not isinstance(recipe, Config):
        fix = "Write objective=fat" if hasattr(recipe, "search") else "Write for example 'fat-digits'"
        raise UserError(f"train takes a recipe's name or a Config, got {type(recipe).__name__}. {fix}.")
    models.name_model(recipe.model)  # the caller's own words, as a name in the call is
    return "", recipe


def _followed(tracker: Trackers, *, progress: bool) -> Trackers:
    """The trackers with the bar of the training."""
    if not progress:
        return tracker
    several = tracker if isinstance(tracker, list | tuple) else [] if tracker is None else [tracker]
    return [*several, TrainingBar()]


def _own(data: Any, changes: dict[str, Any]) -> tuple[Dataset, dict[str, Any]]:
    """The caller's data, and the changes to the configuration that follow from them. How they were read is a note."""
    images, name = as_dataset(data)
    changes = changes | {"data": name}
    if isinstance(images.train, Passing):
        size = images.train.largest
        if changes.setdefault("batch_size", size) != size:
            raise UserError(
                f"batch_size is {changes['batch_size']}, and the loader's batches of {size} are used as they come. "
                "Leave out batch_size."
            )
    if name.startswith("own:") and not isinstance(data, Dataset) and torchrun.rank() == 0:
        print(f"note: {images.note}.", file=sys.stderr)
    return images, changes
