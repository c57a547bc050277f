"""The training loop: the main path of the data, from images to checkpoints.

    batch -> attack (eval mode) -> update (train mode) -> tally;   each epoch: validate, record, save

Every random draw is derived from (seed, epoch, step), so the state of a run is its weights, its momentum and its place,
and a killed run continues bit for bit (on one machine's CPU; tests/training/test_loop.py kills it ten times). A loss or
gradient that is not finite stops the run before the update. This module knows no attack and no objective by name.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from sparring import engine as engines
from sparring import models
from sparring.data import Dataset, Split, batches, count_batches, hold_out, load
from sparring.engine import Engine
from sparring.errors import RunFailed, UserError, unknown
from sparring.objectives import Progress
from sparring.seeds import Draw, derive_seed, generator
from sparring.training import run_folder
from sparring.training.checkpoint import read_facts
from sparring.training.config import Config, differences, model_facts
from sparring.training.state import Saver, State, Tally, restore
from sparring.training.tracking import TensorBoard, Tracker
from sparring.training.validation import accuracies, predicts_one_class, validate

_PROBE = 64  # training images on which the engine checks its copy of the network
SAVE_EVERY = 300.0  # seconds between checkpoints within an epoch: about the most that a power cut can cost
SAVE_AT_ENDS = 20.0  # seconds before the end of another epoch is worth a checkpoint: a GPU trains one in 4 s


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state."""

    def __init__(self, epoch: int, step: int) -> None:
        super().__init__(f"stopped in epoch {epoch} after step {step}; saved")


class Diverged(RunFailed):
    """A loss or its gradient was not finite. That step moved no weight."""

    def __init__(self, epoch: int, step: int, lr: float, schedule: str) -> None:
        self.epoch = epoch
        super().__init__(
            f"the loss or its gradient is not finite by epoch {epoch}, step {step} (learning rate {lr:g}). That step "
            f"changed no weight, nor any checkpoint. Start again with --overwrite and a lower --lr than "
            f"{schedule}."
        )


def train(
    config: Config,
    folder: Path | str,
    *,
    recipe: str = "",
    resume: bool = False,
    overwrite: bool = False,
    device: torch.device | str = "cpu",
    data: Dataset | None = None,
    tracker: Tracker | None = None,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = True,
    engine: engines.EngineKind = "auto",
) -> nn.Module:
    """Train what `config` says into a run folder and return the model of the last epoch (or its average), in eval mode.

    Args:
        resume: continue the run in `folder` if it holds one; its configuration must be this one.
        overwrite: replace a run that is already there.
        data: the data set, where the caller has it loaded.
        tracker: called at every step and epoch.
        stop: called after every step; once it returns True the state is saved and `Interrupted` raised.
        engine: "auto" takes captured graphs where CUDA is; "plain" is the reference.
    """
    folder, device = Path(folder), torch.device(device)
    if engine not in get_args(engines.EngineKind):
        raise unknown("engine", str(engine), get_args(engines.EngineKind))
    data = data or load(config.data)
    training, held = hold_out(data.train, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))
    training, held = training.to(device), held.to(device)
    steps = count_batches(len(training), config.batch_size)
    facts = model_facts(config, data)
    state = begin(config, facts, device)
    _check_last_batch(state.model, len(training), config.batch_size)
    with run_folder.claimed(folder), engines.on(device):  # after every check that needs no folder
        run = _open(folder, config, recipe, data.fingerprint, resume=resume, overwrite=overwrite)
        saved = run.last(device)
        if saved is not None:
            restore(state, saved)
            # Written just before the other: after a crash between the two it is newer, and then it is the one to beat.
            state.best = read_facts(folder / run_folder.BEST).get("metrics", state.best)
        run.keep_metrics(state.epoch - 1)
        run_folder.note_environment(folder, device)
        parts = engine_for(config, state, data, device, engine)
        if saved is not None and parts.average is not None:
            parts.average.restore(saved.part("average"))
        board = TensorBoard(folder, state.epoch) if tensorboard and state.epoch <= config.epochs else None

        with Saver(run, state, facts, parts.average) as saver:
            if tracker:
                tracker.begin(config, steps=steps, epoch=state.epoch, engine=parts.line)
            try:
                while state.epoch <= config.epochs:
                    history = run.metrics()
                    with parts.tuned():
                        one_epoch(state, config, parts, training, steps, history, saver.save, tracker, stop)
                    judged = parts.judged()
                    record = _record(state, config, judged, held, history)
                    run.record(record)
                    is_best = state.best is None or _score(record) > _score(state.best)
                    if is_best:
                        state.best = record
                        saver.keep(judged.model, record)
                    state.epoch, state.step, state.tally = state.epoch + 1, 0, Tally.empty(device)
                    if state.epoch > config.epochs or saver.idle > SAVE_AT_ENDS:
                        saver.save()
                    if board:
                        board.add(record)
                    if tracker:
                        tracker.epoch(record, best=is_best)
            finally:
                if board:
                    board.close()
                if tracker:
                    tracker.end()
        return parts.judged().model.eval()


def pick_device(name: str) -> torch.device:
    """The device of that name, checked to exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}. Write auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported. Write auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} does not exist: there are {torch.cuda.device_count()} CUDA devices. Use --device cpu."
        )
    return device


def one_epoch(
    state: State,
    config: Config,
    engine: Engine,
    training: Split,
    steps: int,
    history: list[dict[str, Any]],
    save: Callable[[], None],
    tracker: Tracker | None,
    stop: Callable[[], bool],
) -> None:
    """One pass over the training data, from wherever the state stands; `history` holds the epochs before it."""
    state.model.train()
    tally, device = state.tally, training.x.device
    began = saved = time.perf_counter()
    before = tally.seconds
    for x, y in batches(
        training,
        config.batch_size,
        seed=config.seed,
        epoch=state.epoch,
        augment=config.augment,
        start=state.step,
    ):
        progress = Progress(state.epoch + state.step / steps, config.epochs, history)
        lr, awp = progress.value(config.lr), progress.value(config.awp)
        draws = generator(device, config.seed, Draw.ATTACK, state.epoch, state.step)

        found = engine.attack(config.objective.search(progress), x, y, draws)
        loss = engine.update(x, found.x_adv, y, lr, awp)

        tally.loss += loss.double() * len(x)
        tally.backprops += found.backprops.sum()
        tally.images += len(x)
        state.step += 1
        now = time.perf_counter()
        tally.seconds = before + now - began
        if tracker:
            tracker.step(state.epoch, state.step, lambda: tally.backprops.item() / tally.images)
        stopping, due = stop(), now - saved > SAVE_EVERY
        if (stopping or due or state.step % engine.check_every == 0 or state.step == steps) and engine.failed():
            raise Diverged(state.epoch, state.step, lr, str(config.lr))
        if stopping or due:
            save()
            saved = now
        if stopping:
            raise Interrupted(state.epoch, state.step)


def _record(
    state: State, config: Config, judged: engines.Judged, held: Split, history: list[dict[str, Any]]
) -> dict[str, Any]:
    """One epoch in numbers. Accuracies are fractions, on the held-out validation data."""
    tally = state.tally
    progress = Progress(state.epoch, config.epochs, history)
    how: dict[str, Any] = {"seed": config.seed, "gradients": judged.gradients}
    natural, robust = validate(judged.model, held, eps=config.validation_eps, **how)
    own = config.objective.metrics(progress)
    attack = config.objective.own_attack(progress)
    if attack is not None:
        (own["own"],) = accuracies(judged.model, held, [attack if attack["eps"] else None], **how)
    if predicts_one_class(judged.model, held):
        own["one_class"] = True
    return {
        "epoch": state.epoch,
        "lr": progress.value(config.lr),
        "eps": own.pop("eps"),
        "tau": own.pop("tau", None),
        "loss": tally.loss.item() / tally.images,
        "natural": natural,
        "pgd10": robust,
        **own,
        "backprops": tally.backprops.item() / tally.images,
        "seconds": tally.seconds,
        "images_per_second": tally.images / tally.seconds,
    }


def _score(record: dict[str, Any]) -> tuple[float, float]:
    """What the best epoch maximises: robust accuracy, then natural accuracy; of equals the first stays."""
    return record["pgd10"], record["natural"]


def _open(
    folder: Path, config: Config, recipe: str, images: str, *, resume: bool, overwrite: bool
) -> run_folder.RunFolder:
    """Create the run, or open the one in the folder if it has this configuration and the same images."""
    if not (resume and (folder / run_folder.CONFIG).exists()):
        return run_folder.create(folder, config, recipe, images=images, overwrite=overwrite)
    run = run_folder.open_run(folder)
    if run.images and run.images != images and run.config.data == config.data:
        raise UserError(
            f"the training images of {config.data} differ from those that {folder} was started with. Restore them, "
            "or start another run."
        )
    changed = differences(run.config, config)
    if changed and run.images == images and replace(run.config, data=config.data) == config:
        run, changed = replace(run, config=config), []  # the same images at another path
        run_folder.write_config(run)
    if changed:
        longer = "A longer run is another run, as schedules follow its length: --out. " if _longer(changed) else ""
        raise UserError(
            f"{folder} was started with another configuration ({'; '.join(changed)}). {longer}"
            f"Resume it as it was: {shlex.join(['sparring', 'train', '--out', str(folder), '--resume'])}."
        )
    run_folder.sweep(folder)
    return run


def _longer(changed: Sequence[str]) -> bool:
    return any(words.startswith("epochs ") for words in changed)


def begin(config: Config, facts: dict[str, Any], device: torch.device) -> State:
    """The state of a new run: weights drawn from the seed. The global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, Draw.WEIGHTS))  # the CPU's; CUDA's is untouched
        model = models.build(
            facts["name"],
            num_classes=facts["num_classes"],
            channels=facts["channels"],
            size=tuple(facts["size"]),
            normalize=facts["normalize"],
        ).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config.lr.at(1, config.epochs),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    return State(model, optimizer, Tally.empty(device))


def engine_for(
    config: Config, state: State, data: Dataset, device: torch.device, kind: engines.EngineKind, **how: Any
) -> Engine:
    """The engine that trains what `config` says; `how` goes to `engine.prepare` as it is."""
    return engines.prepare(
        state.model,
        state.optimizer,
        config.objective.loss,
        batch=config.batch_size,
        shape=(data.channels, *data.size),
        classes=data.num_classes,
        device=device,
        half=config.precision == "bf16",
        kind=kind,
        ema=config.ema,
        images=data.train.x[:_PROBE].to(device).float() / 255,
        fixed_sizes=config.objective.fixed_sizes,
        **how,
    )


def _check_last_batch(model: nn.Module, images: int, batch_size: int) -> None:
    """Refuse a last batch of one image: batch-norm has no statistics of one value."""
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if normalised and (batch_size == 1 or images % batch_size == 1):
        larger = next((size for size in range(batch_size + 1, images + 1) if images % size != 1), images)
        raise UserError(
            f"the last batch of {images} training images would hold one image, and batch-norm needs two. "
            f"Use --batch-size {larger}."
        )
