"""The training loop: the main path of the data, from images to checkpoints.

    batch -> search (eval mode) -> loss (train mode) -> SGD -> tally;   each epoch: validate, record, save

Every random draw is named by (seed, epoch, step), so the state of a run is its weights, its momentum and its place, and
a run that was killed continues bit for bit (on one machine's CPU; tests/test_train.py kills it ten times). A loss or
gradient that is not finite stops the run before the update. This module knows no attack and no objective by name.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sparring import engine as engines
from sparring import models
from sparring.attacks import pgd
from sparring.data import Dataset, Split, batches, count_batches, hold_out, load
from sparring.engine import Engine, Network, on
from sparring.errors import RunFailed, UserError
from sparring.objectives import OBJECTIVES
from sparring.seeds import derive_seed, generator
from sparring.training import run_folder
from sparring.training.checkpoint import read_facts
from sparring.training.config import Config, differences, model_facts
from sparring.training.state import Keeper, State, Tally, restore
from sparring.training.tracking import Board

_WEIGHTS, _HOLD_OUT, _ATTACK, _VALIDATION = range(1, 5)  # what a draw is for
_EVALUATION_BATCH = 500
SAVE_EVERY = 300.0  # seconds between checkpoints within an epoch: about the most that a power cut can cost
SAVE_AT_ENDS = 20.0  # seconds before the end of another epoch is worth a checkpoint: a GPU trains one in 4 s


class Watch(Protocol):
    """Somebody who looks on: a progress bar, a log."""

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Training begins, or goes on, at this epoch; an epoch has so many steps; `engine` says in a line what runs."""

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """A step is done. `backprops()` gives the epoch's mean so far, and makes a GPU wait."""

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """An epoch is done, and its record on the disk."""

    def end(self) -> None:
        """Training stops, for whatever reason."""


class Interrupted(Exception):
    """The run was asked to stop, and has saved its place."""

    def __init__(self, epoch: int, step: int) -> None:
        super().__init__(f"stopped in epoch {epoch} after step {step}; saved")


class Diverged(RunFailed):
    """A loss or its gradient was not finite. That step moved no weight."""

    def __init__(self, epoch: int, step: int, lr: float, schedule: str) -> None:
        self.epoch = epoch
        super().__init__(
            f"the loss or its gradient is not finite by epoch {epoch}, step {step} (learning rate {lr:g}). It moved no "
            f"weight; what was saved before is good. Begin again with --overwrite and a lower --lr than {schedule}."
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
    watch: Watch | None = None,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = True,
    engine: engines.Kind = "auto",
) -> nn.Module:
    """Train what `config` says into a run folder and return the model of the last epoch (or its average), in eval mode.

    Args:
        resume: continue the run in `folder` if it holds one; its configuration must be this one.
        overwrite: replace a run that is already there.
        data: the data set, where the caller has it loaded.
        stop: asked after every step; once it says yes the place is saved and `Interrupted` raised.
        engine: "auto" takes captured graphs where CUDA is; "plain" is the reference.
    """
    folder, device = Path(folder), torch.device(device)
    data = data or load(config.data)
    training, held = hold_out(data.train, config.validation, seed=derive_seed(config.seed, _HOLD_OUT))
    training, held = training.to(device), held.to(device)
    steps = count_batches(len(training), config.batch_size)
    facts = model_facts(config, data)
    state = begin(config, facts, device)
    _check_last_batch(state.model, len(training), config.batch_size)
    with run_folder.claimed(folder), on(device):  # after what may be refused
        run = _open(folder, config, recipe, data.fingerprint, resume=resume, overwrite=overwrite)
        saved = run.last(device)
        if saved is not None:
            restore(state, saved)
            # Written just before the other: a cut between the two leaves it newer, and then it is the one to beat.
            state.best = read_facts(folder / run_folder.BEST).get("metrics", state.best)
        run.keep_metrics(state.epoch - 1)
        run_folder.note_environment(folder, device)
        parts = engine_for(config, state, data, device, engine)
        if saved is not None and parts.average is not None:
            parts.average.restore(saved.part("average"))
        board = Board(folder, state.epoch) if tensorboard and state.epoch <= config.epochs else None

        with Keeper(run, state, facts, parts.average) as keeper:
            if watch:
                watch.begin(config, steps=steps, epoch=state.epoch, engine=parts.line)
            try:
                while state.epoch <= config.epochs:
                    history = run.metrics()
                    # An attack of an objective's own comes in every batch size: too many to tune for.
                    with engines.tuned(parts) if OBJECTIVES[config.objective].walks else nullcontext():
                        one_epoch(state, config, parts, training, steps, history, keeper.save, watch, stop)
                    judged, network = parts.judged(state.model)
                    record = _record(state, config, held, judged, network, history)
                    run.record(record)
                    is_best = state.best is None or _score(record) > _score(state.best)
                    if is_best:
                        state.best = record
                        keeper.keep(judged, record)
                    state.epoch, state.step, state.tally = state.epoch + 1, 0, Tally.empty(device)
                    if state.epoch > config.epochs or keeper.idle > SAVE_AT_ENDS:
                        keeper.save()
                    if board:
                        board.add(record)
                    if watch:
                        watch.epoch(record, best=is_best)
            finally:
                if board:
                    board.close()
                if watch:
                    watch.end()
        return (parts.average.read() if parts.average else state.model).eval()


def one_epoch(
    state: State,
    config: Config,
    engine: Engine,
    training: Split,
    steps: int,
    history: list[dict[str, Any]],
    save: Callable[[], None],
    watch: Watch | None,
    stop: Callable[[], bool],
) -> None:
    """One pass over the training data, from wherever the state stands; `history` holds the epochs before it."""
    objective = OBJECTIVES[config.objective]
    model, tally = state.model.train(), state.tally
    attacked = model if objective.walks else engine.network  # the engine's walk has the network in it
    device = training.x.device
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
        place = state.epoch + state.step / steps
        setting = objective.adapt(config.attack.at(place, config.epochs), history)
        lr = config.lr.at(place, config.epochs)
        draws = generator(device, config.seed, _ATTACK, state.epoch, state.step)

        found = objective.find(attacked, x, y, setting, draws, engine.walk)
        loss = engine.update(x, found.x_adv, y, lr, config.awp.at(place, config.epochs))

        tally.loss += loss.double() * len(x)
        tally.backprops += found.backprops.sum()
        tally.images += len(x)
        state.step += 1
        now = time.perf_counter()
        tally.seconds = before + now - began
        if watch:
            watch.step(state.epoch, state.step, lambda: tally.backprops.item() / tally.images)
        stopping, due = stop(), now - saved > SAVE_EVERY
        if (stopping or due or state.step % engine.check_every == 0 or state.step == steps) and engine.update.failed():
            raise Diverged(state.epoch, state.step, lr, str(config.lr))
        if stopping or due:
            save()
            saved = now
        if stopping:
            raise Interrupted(state.epoch, state.step)


def _record(
    state: State, config: Config, held: Split, model: nn.Module, network: Network, history: list[dict[str, Any]]
) -> dict[str, Any]:
    """One epoch in numbers. Accuracies are fractions, on the held-out validation data."""
    tally = state.tally
    objective = OBJECTIVES[config.objective]
    setting = objective.adapt(config.attack.at(state.epoch, config.epochs), history)
    natural, robust = validate(model, held, eps=config.validation_eps, seed=config.seed, network=network)
    # What the objective's own schedules say now, and what only it measures.
    own: dict[str, Any] = {
        name: getattr(setting, name) for name in ("fosc", "margin", "rho") if f"attack.{name}" in objective.reads
    }
    if objective.measured:
        attack = {"eps": setting.eps, "step_size": setting.step_size, "steps": setting.steps, "start": setting.start}
        (accuracy,) = _accuracies(model, held, [attack if setting.eps else None], config.seed, network)
        own |= {"steps": setting.steps, "own": accuracy}
    if _one_class(model, held):
        own["one_class"] = True
    return {
        "epoch": state.epoch,
        "lr": config.lr.at(state.epoch, config.epochs),
        "eps": setting.eps,
        "tau": setting.tau if objective.friendly else None,
        "loss": tally.loss.item() / tally.images,
        "natural": natural,
        "pgd10": robust,
        **own,
        "backprops": tally.backprops.item() / tally.images,
        "seconds": tally.seconds,
        "images_per_second": tally.images / tally.seconds,
    }


def validate(
    model: nn.Module, split: Split, *, eps: float, seed: int, network: Network | None = None
) -> tuple[float, float]:
    """Natural and PGD-10 accuracy (steps of eps/4, uniform start, the same start every time).

    Gradients come from `network`, the engine's copy of the model, where there is one; the verdict is the model's.
    """
    weak = {"eps": eps, "step_size": eps / 4, "steps": 10, "start": "uniform"}
    natural, robust = _accuracies(model, split, [None, weak], seed, network)
    return natural, robust


def _accuracies(
    model: nn.Module, split: Split, attacks: Sequence[dict[str, Any] | None], seed: int, network: Network | None
) -> list[float]:
    """Under each attack's PGD; None is no attack."""
    right = torch.zeros(len(attacks), dtype=torch.int64, device=split.x.device)
    was_training = model.training
    model.eval()
    for index, (x, y) in enumerate(batches(split, _EVALUATION_BATCH)):
        for place, attack in enumerate(attacks):
            draws = generator(x.device, seed, _VALIDATION, index)
            points = x if attack is None else pgd(network or model, x, y, generator=draws, **attack)
            with torch.no_grad():
                right[place] += (model(points).argmax(dim=1) == y).sum()
    model.train(was_training)
    return [float(count) for count in (right.double() / len(split)).tolist()]


def _one_class(model: nn.Module, split: Split) -> bool:
    """Whether it says the same for images of several classes, as a network does whose units are dead."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        said = torch.cat([model(x).argmax(dim=1) for x, _ in batches(split, _EVALUATION_BATCH)])
    model.train(was_training)
    return bool((said == said[0]).all() and (split.y != split.y[0]).any())


def _score(record: dict[str, Any]) -> tuple[float, float]:
    """The best epoch is the most robust one; natural accuracy breaks ties, then the earlier stays."""
    return record["pgd10"], record["natural"]


def _open(folder: Path, config: Config, recipe: str, images: str, *, resume: bool, overwrite: bool) -> run_folder.Run:
    """The run: a new one, or the one that is there, if it is this one on the same images, wherever they lie now."""
    if not (resume and (folder / run_folder.CONFIG).exists()):
        return run_folder.create(folder, config, recipe, images=images, overwrite=overwrite)
    run = run_folder.open_run(folder)
    if run.images and run.images != images and run.config.data == config.data:
        raise UserError(
            f"the training images of {config.data} are not those that {folder} was begun with. Put them back as they "
            "were, or begin another run."
        )
    changed = differences(run.config, config)
    if changed and run.images == images and replace(run.config, data=config.data) == config:
        run, changed = replace(run, config=config), []  # the same images, at another place
        run_folder.write_config(run)
    if changed:
        longer = "A longer run is another one, for schedules follow its length: --out. " if _longer(changed) else ""
        raise UserError(
            f"{folder} was begun with another configuration ({'; '.join(changed)}). {longer}"
            f"Resume it as it was: {shlex.join(['sparring', 'train', '--out', str(folder), '--resume'])}."
        )
    run_folder.sweep(folder)
    return run


def _longer(changed: Sequence[str]) -> bool:
    return any(words.startswith("epochs ") for words in changed)


def begin(config: Config, facts: dict[str, Any], device: torch.device) -> State:
    """Fresh weights from the seed; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, _WEIGHTS))  # the CPU's; CUDA's is untouched
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


def engine_for(config: Config, state: State, data: Dataset, device: torch.device, kind: engines.Kind) -> Engine:
    """The engine that trains what `config` says."""
    objective = OBJECTIVES[config.objective]
    return engines.prepare(
        state.model,
        state.optimizer,
        lambda model, x, x_adv, y: objective.loss(model, x, x_adv, y, config.beta),
        batch=config.batch_size,
        shape=(data.channels, *data.size),
        classes=data.num_classes,
        device=device,
        half=config.precision == "bf16",
        kind=kind,
        ema=config.ema,
    )


def _check_last_batch(model: nn.Module, images: int, batch_size: int) -> None:
    """Batch-norm has no statistics of one value."""
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if normalised and (batch_size == 1 or images % batch_size == 1):
        larger = next((size for size in range(batch_size + 1, images + 1) if images % size != 1), images)
        raise UserError(
            f"the last batch of {images} training images would hold one image, and batch-norm needs two. "
            f"Use --batch-size {larger}."
        )
