"""The training loop: the main path of the data, from images to checkpoints.

    batch -> attack (eval mode) -> update (train mode) -> tally;   each epoch: validate, record, save

Every random draw is derived from (seed, epoch, step), so the state of a run is its weights, what its optimiser
remembers and its place, and a killed run continues bit for bit (on one machine's CPU; tests/training/test_loop.py kills
it ten times). A loss or gradient that is not finite stops the run before the update. This module knows no attack and no
objective by name. Of several processes each runs the same loop on its part of every batch, and the first one writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from sparring import engine as engines
from sparring import models
from sparring._version import __version__
from sparring.attacks import Found
from sparring.attacks.checks import NotFinite
from sparring.attacks.losses import soft_targets
from sparring.data import (
    Batch,
    Dataset,
    Passing,
    Split,
    Training,
    count_steps,
    load,
    training_batches,
)
from sparring.engine import Engine
from sparring.engine.update.exchange import statistics
from sparring.errors import RunFailed, unknown
from sparring.models import own
from sparring.objectives import Progress
from sparring.schedules import constant
from sparring.seeds import Draw, batch_generator
from sparring.training import signals
from sparring.training.all_reduce import Mean
from sparring.training.config import Config, model_facts
from sparring.training.config import to_json as config_json
from sparring.training.distributed import ALONE, World
from sparring.training.images import images_of
from sparring.training.initial import Initial, begin_from
from sparring.training.opening import look, opened
from sparring.training.optimisers import OWN, MakeOptimizer, numbers
from sparring.training.resume import read_initial
from sparring.training.run_folder import RunFolder
from sparring.training.start import begin, check_parts, engine_for, one_image, own_draws, soft
from sparring.training.state import NoSaver, Saver, State
from sparring.training.sync_bn import separate
from sparring.training.trackers import Trackers, follow
from sparring.training.tracking import Tracker
from sparring.training.validation import accuracies, predicts_one_class, validate

_log = logging.getLogger("sparring")
SAVE_EVERY = 300.0  # seconds between checkpoints within an epoch: about the most that a power cut can cost
SAVE_AT_ENDS = 20.0  # seconds before the end of another epoch is worth a checkpoint: a GPU trains one in 4 s


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state."""

    elsewhere: bool | None = None  # of several processes: whether another one reports it

    def __init__(self, epoch: int, step: int, *, saved: bool = True) -> None:
        where = "saved" if saved else f"the last checkpoint is that of epoch {epoch - 1}" if epoch > 1 else "not saved"
        super().__init__(f"stopped in epoch {epoch} after step {step}; {where}")


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
    model: nn.Module | own.Make | None = None,
    initial: Callable[[str], Initial] | None = None,
    renewed: Collection[str] = (),
    say: Callable[[str], None] = _log.info,
    data: Dataset | None = None,
    tracker: Trackers = None,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = True,
    engine: engines.EngineKind = "auto",
    optimizer: MakeOptimizer | None = None,
    own_lr: bool = False,
    deterministic: bool = False,
    world: World = ALONE,
) -> nn.Module:
    """Train what `config` says into a run folder and return the model of the last epoch (or its average), in eval mode.

    Args:
        resume: continue the run in `folder` if it holds one; its configuration must be this one, or a longer one.
        overwrite: replace a run that is already there.
        model: the network, where it is the caller's own, or what makes it. A copy is trained: the caller's stays as it
            is. Without it, `config.model` names one.
        initial: reads the weights that `config.init` names.
        renewed: schedules that are given anew for a longer run, by their names (lr, attack.tau).
        say: told in one line what is not as it was: a new head, another length.
        data: the data set, where the caller has it loaded.
        tracker: called at every step and epoch: a `Tracker`, a name (csv, tensorboard, wandb, trackio), or several.
        stop: called after every step; once it returns True the state is saved and `Interrupted` raised.
        engine: "auto" takes captured graphs where CUDA is; "plain" is the reference.
        optimizer: makes the optimiser from the list of trainable parameters, instead of the one that `config` names.
        own_lr: keep that optimiser's own learning rate throughout, instead of the schedule of `config`.
        deterministic: on CUDA, repeat a run bit for bit on the same kind of GPU and software, at some cost in speed.
        world: the processes that train together; each calls this function with the same arguments.
    """
    folder, device = Path(folder), torch.device(device)
    say = say if world.first else lambda line: None
    with world.together():
        if engine not in get_args(engines.EngineKind):
            raise unknown("engine", str(engine), get_args(engines.EngineKind))
        followers = follow(tracker if world.first else None, folder, tensorboard=tensorboard and world.first)
        config = config if model is None else replace(config, model=models.own_name(model))
        data = data or load(config.data)
        images = images_of(config, data, device)
        training, held = images.training, images.held
        steps = count_steps(training, config.batch_size)
        facts = model_facts(config, data)
        found = look(folder, resume=resume)
    world.agree({"version": __version__, "configuration": config_json(config), "data": images.fingerprint})
    world.agree({"run folder": [str(folder.absolute()), found.run, found.checkpoint]})
    with world.together():
        state = begin(config, facts, device, model=model, optimizer=optimizer, fetch=not found.checkpoint)
        if optimizer is not None:
            rate = constant(float(state.optimizer.param_groups[0]["lr"])) if own_lr else config.lr
            config = replace(config, optimizer=f"{OWN}{type(state.optimizer).__name__}", lr=rate, nesterov=False)
        check_parts(state.model, training, config, world)
        started = None if found.checkpoint or not config.init else read_initial(initial, config.init)
        if started is not None and (note := begin_from(started, state.model, data.num_classes)):
            say(note)
    world.agree({"optimiser": [type(state.optimizer).__name__, numbers(state.optimizer)]})

    with ExitStack() as held_open:
        held_open.enter_context(engines.on(device))
        held_open.enter_context(engines.deterministic(deterministic))
        run, saved = held_open.enter_context(
            opened(
                RunFolder(folder, config, recipe, images.fingerprint, started.digest if started else ""),
                found,
                state,
                overwrite=overwrite,
                seekable=images.seekable,
                initial=initial,
                renewed=renewed,
                say=say,
                device=device,
                record=({"deterministic": True} if deterministic else {}) | world.record(synchronised=config.sync_bn),
                world=world,
            )
        )
        history = world.from_first(run.metrics() if world.first else [])
        if config.init and facts["normalize"]:  # the layer came with the weights
            facts["normalize"] = [state.model.get_buffer(f"normalize.{n}").flatten().tolist() for n in ("mean", "std")]
        with world.together(), own_draws(config, device, 0, 0):
            parts = engine_for(config, state, data, device, engine, world=world)
        held_open.callback(parts.release)
        held_open.callback(separate, state.model, *([] if parts.average is None else [parts.average.model]))
        world.agree({"engine": [type(parts.step).__name__, parts.head.partition(" (")[0], deterministic]})
        if saved is not None and parts.average is not None:
            parts.average.restore(saved.part("average"))
        saver = held_open.enter_context(Saver(run, state, facts, parts.average)) if world.first else NoSaver()
        line = parts.line + (", deterministic" if deterministic else "")
        followers.begin(config, steps=steps, epoch=state.epoch, engine=line)
        held_open.callback(followers.end)

        while state.epoch <= config.epochs:
            try:
                with parts.tuned():
                    one_epoch(state, config, parts, training, steps, history, saver.save, followers, stop, world)
            except Interrupted as interrupted:
                _stop_together(interrupted, saver, world)
                raise
            world.synchronise(unexchanged(state.model))
            judged = parts.judged()
            with own_draws(config, device, state.epoch, steps):
                record = world.from_first(_record(state, config, judged, held, history, world))
            history = [*history, record]
            is_best = state.best is None or _score(record) > _score(state.best)
            state.close_epoch(record, best=is_best)
            with world.together():
                if world.first:
                    run.record(record)
                if is_best:
                    saver.keep(judged.model, record)
                if state.epoch > config.epochs or saver.idle > SAVE_AT_ENDS or not images.seekable:
                    saver.save()
            followers.epoch(record, best=is_best)
        return parts.judged().model.eval()


def _stop_together(interrupted: Interrupted, saver: Saver | NoSaver, world: World) -> None:
    """Let every process end as the one does that was asked to, once the first has written."""
    with world.together():
        saver.finish()
    heard = max(int(number) for number in world.texts(str(signals.last())))
    if heard and not signals.last():
        signals.note(heard)
    interrupted.elsewhere = world.elsewhere


def one_epoch(
    state: State,
    config: Config,
    engine: Engine,
    training: Training,
    steps: int,
    history: list[dict[str, Any]],
    save: Callable[[], None],
    tracker: Tracker | None,
    stop: Callable[[], bool],
    world: World = ALONE,
) -> None:
    """One pass over the training data, from wherever the state stands; `history` holds the epochs before it."""
    state.model.train()
    tally, device = state.tally, state.tally.loss.device
    seekable = not isinstance(training, Passing)  # a checkpoint within an epoch would be of no use otherwise
    target = targets(config, state.classes)
    exchange = engine.exchange if isinstance(engine.exchange, Mean) else None
    began = saved = time.perf_counter()
    before = tally.seconds
    for batch in training_batches(
        training,
        config.batch_size,
        seed=config.seed,
        epoch=state.epoch,
        augment=config.augment,
        start=state.step,
        process=world.share,
    ):
        x, y = batch.x, batch.y
        progress = Progress(state.epoch + state.step / steps, config.epochs, history)
        lr, awp = progress.value(config.lr), progress.value(config.awp)
        place = (state.epoch, state.step)

        def diverged(step: int, lr: float = lr) -> Diverged:
            error = Diverged(state.epoch, step, lr, str(config.lr))
            error.elsewhere = world.elsewhere
            return error

        draws = batch_generator(device, config.seed, Draw.ATTACK, *place, part=batch.part, of=batch.of)

        with own_draws(config, device, *place, world.rank):
            try:
                found: Found | None = engine.attack(config.objective.search(progress), x, y, draws)
            except NotFinite:
                if not world.grouped:
                    raise diverged(state.step + 1) from None
                found = None
            backprops = y.new_zeros(()) if found is None else found.backprops.sum()
            if exchange is not None:
                exchange.begin(len(x), batch.of, backprops, stop=stop())
                if found is None:  # the others wait for the update: all stop before a weight moves
                    exchange.spoil()
            x_adv = x if found is None else found.x_adv
            try:
                loss = engine.update(x, x_adv, target(batch), lr, awp)
            except ValueError as error:
                if batch.of > 1 or "more than 1 value per channel" not in str(error):
                    raise
                raise one_image(f"batch {state.step + 1} of epoch {state.epoch}") from error

        tally.loss += loss.double() * batch.of
        tally.backprops += backprops if exchange is None else exchange.backprops.long()
        tally.images += batch.of
        state.step += 1
        now = time.perf_counter()
        tally.seconds = before + now - began
        if tracker:
            tracker.step(state.epoch, state.step, lambda: tally.backprops.item() / tally.images)
        stopping = stop() if exchange is None else exchange.stopping()
        due = seekable and now - saved > SAVE_EVERY
        checked = stopping or state.step % engine.check_every == 0 or state.step == steps
        failed = (checked or due) and engine.failed()
        if failed and (checked or exchange is None):  # of several processes all check at the same steps
            raise diverged(state.step)
        if ((stopping and seekable) or due) and not failed:
            save()
            saved = now
        if stopping:
            raise Interrupted(state.epoch, state.step, saved=seekable)


def targets(config: Config, classes: int) -> Callable[[Batch], Tensor]:
    """What an update is told of a batch's labels: class numbers, or soft targets where labels are smoothed or mixed."""
    if not soft(config):
        return lambda batch: batch.y
    smoothing = config.label_smoothing
    return lambda batch: soft_targets(batch.y, classes, smoothing=smoothing, other=batch.other, share=batch.share)


def _record(
    state: State,
    config: Config,
    judged: engines.Judged,
    held: Split,
    history: list[dict[str, Any]],
    world: World,
) -> dict[str, Any]:
    """One epoch in numbers. Accuracies are fractions, on the held-out validation data."""
    tally = state.tally
    progress = Progress(state.epoch, config.epochs, history)
    how: dict[str, Any] = {"seed": config.seed, "gradients": judged.gradients, "share": world.share}
    how["total"] = world.total
    natural, robust = validate(judged.model, held, eps=config.validation_radius, norm=config.objective.norm, **how)
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


def unexchanged(model: nn.Module) -> list[Tensor]:
    """The buffers that no update exchanges."""
    exchanged = {id(buffer) for buffer in statistics(model)}
    return [buffer for buffer in model.buffers() if id(buffer) not in exchanged]
