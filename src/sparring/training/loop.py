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
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
    as_pixels,
    cannot_seek,
    count_steps,
    load,
    mixes_labels,
    training_batches,
)
from sparring.engine import Engine
from sparring.engine.update.exchange import statistics
from sparring.errors import RunFailed, UserError, unknown
from sparring.models import own
from sparring.objectives import Progress
from sparring.schedules import constant
from sparring.seeds import Draw, batch_generator, derive_seed, seeded
from sparring.shares import Share
from sparring.training import optimisers, run_folder
from sparring.training.all_reduce import Mean
from sparring.training.checkpoint import checksum, read_facts
from sparring.training.config import Config, model_facts
from sparring.training.config import to_json as config_json
from sparring.training.distributed import ALONE, Backend, World, local_device
from sparring.training.images import images_of
from sparring.training.initial import Initial, begin_from
from sparring.training.optimisers import OWN, MakeOptimizer
from sparring.training.resume import continued, read_initial
from sparring.training.state import NoSaver, Saver, State, Tally, restore
from sparring.training.sync_bn import separate, synchronise
from sparring.training.trackers import Trackers, follow
from sparring.training.tracking import Tracker
from sparring.training.validation import accuracies, predicts_one_class, validate

_log = logging.getLogger("sparring")
_PROBE = 64  # training images on which the engine checks its copy of the network
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
        there, goes_on = (resume and (folder / name).exists() for name in (run_folder.CONFIG, run_folder.LAST))
    world.agree({"version": __version__, "configuration": config_json(config), "data": images.fingerprint})
    world.agree({"run folder": [there, goes_on]})
    with world.together():
        state = begin(config, facts, device, model=model, optimizer=optimizer, fetch=not goes_on)
        if optimizer is not None:
            rate = constant(float(state.optimizer.param_groups[0]["lr"])) if own_lr else config.lr
            config = replace(config, optimizer=f"{OWN}{type(state.optimizer).__name__}", lr=rate, nesterov=False)
        check_parts(state.model, training, config, world)
        started = None if goes_on or not config.init else read_initial(initial, config.init)
        if started is not None and (note := begin_from(started, state.model, data.num_classes)):
            say(note)
    given = run_folder.RunFolder(folder, config, recipe, images.fingerprint, started.digest if started else "")
    with ExitStack() as held_open:
        held_open.enter_context(engines.on(device))
        with world.together():
            if world.first:  # after every check that needs no folder
                held_open.enter_context(run_folder.claimed(folder))
            run = continued(given, initial, renewed, say) if there else given
            saved = run.last(device) if there else None
            if saved is not None:
                restore(state, saved)
                if state.step and not images.seekable:
                    raise cannot_seek()
                # Written just before the other: after a crash between the two it is newer, and then the one to beat.
                state.best = read_facts(folder / run_folder.BEST).get("metrics", state.best)
        if world.grouped:
            place = [state.epoch, state.step, run.config.epochs]
            world.agree({"weights": checksum(state.model.state_dict()), "place in training": place})
        with world.together():  # nothing is written before every process has read
            if world.first:
                if there:
                    run_folder.keep_config(run)
                else:
                    how: dict[str, Any] = {"images": given.images, "init": given.init, "overwrite": overwrite}
                    run = run_folder.create(folder, config, recipe, **how)
                world.begins(folder)
                run.keep_metrics(state.epoch - 1)
                run_folder.note_environment(folder, device, **world.record(synchronised=config.sync_bn))
        history = world.from_first(run.metrics() if world.first else [])
        if config.init and facts["normalize"]:  # the layer came with the weights
            facts["normalize"] = [state.model.get_buffer(f"normalize.{n}").flatten().tolist() for n in ("mean", "std")]
        with world.together(), own_draws(config, device, 0, 0):
            parts = engine_for(config, state, data, device, engine, world=world)
        held_open.callback(parts.release)
        held_open.callback(separate, state.model, *([] if parts.average is None else [parts.average.model]))
        world.agree({"engine": [type(parts.step).__name__, parts.head.partition(" (")[0]]})
        if saved is not None and parts.average is not None:
            parts.average.restore(saved.part("average"))

        saver: Saver | NoSaver = NoSaver()
        if world.first:
            saver = held_open.enter_context(Saver(run, state, facts, parts.average))
        followers.begin(config, steps=steps, epoch=state.epoch, engine=parts.line)
        held_open.callback(followers.end)
        while state.epoch <= config.epochs:
            try:
                with parts.tuned():
                    one_epoch(state, config, parts, training, steps, history, saver.save, followers, stop, world)
            except Interrupted as interrupted:
                with world.together():  # no process leaves before the first has written
                    saver.finish()
                interrupted.elsewhere = None if not world.grouped else not world.first
                raise
            world.synchronise(unexchanged(state.model))
            judged = parts.judged()
            with own_draws(config, device, state.epoch, steps):
                record = world.from_first(_record(state, config, judged, held, history, world))
            history = [*history, record]
            is_best = state.best is None or _score(record) > _score(state.best)
            state.epoch, state.step, state.tally = state.epoch + 1, 0, Tally.empty(device)
            with world.together():
                if world.first:
                    run.record(record)
                if is_best:
                    state.best = record
                    saver.keep(judged.model, record)
                if state.epoch > config.epochs or saver.idle > SAVE_AT_ENDS or not images.seekable:
                    saver.save()
            followers.epoch(record, best=is_best)
        return parts.judged().model.eval()


def pick_device(name: str, backend: Backend = "auto") -> torch.device:
    """The device of that name, checked to exist. Of the processes of one machine, each has a GPU of its own."""
    name = local_device(name, backend)
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
            error.elsewhere = None if not world.grouped else not world.first  # all processes find the same
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
            loss = engine.update(x, x_adv, target(batch), lr, awp)

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
    if not _soft(config):
        return lambda batch: batch.y
    smoothing = config.label_smoothing
    return lambda batch: soft_targets(batch.y, classes, smoothing=smoothing, other=batch.other, share=batch.share)


def _soft(config: Config) -> bool:
    return config.label_smoothing > 0 or mixes_labels(config.augment)


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


def own_draws(
    config: Config, device: torch.device, epoch: int, step: int, rank: int = 0
) -> AbstractContextManager[None]:
    """Seeds, inside a block, for what a network of the caller's own draws (dropout). Built-in ones draw nothing.

    Such draws belong to the process, not to the image: with another number of processes they are others.
    """
    if models.built_in(config.model):
        return nullcontext()
    return seeded(device, config.seed, Draw.NETWORK, epoch, step, *((rank,) if rank else ()))


def begin(
    config: Config,
    facts: dict[str, Any],
    device: torch.device,
    *,
    model: nn.Module | own.Make | None = None,
    optimizer: MakeOptimizer | None = None,
    fetch: bool = True,
) -> State:
    """The state of a new run: weights drawn from the seed, or those of a copy of the caller's own `model`.

    The global random state is left alone. `fetch`: whether pretrained weights are needed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, Draw.WEIGHTS))  # the CPU's; CUDA's is untouched
        network = _network(facts, model, fetch).to(device)
    if not models.built_in(config.model):
        with own_draws(config, device, 0, 0):
            given = {name: facts[name] for name in ("num_classes", "channels")}
            models.check_network(network, **given, size=tuple(facts["size"]))
        if config.ema:
            own.copied(network)  # the average is a copy: refuse here what cannot be copied
    tally, classes = Tally.empty(device), facts["num_classes"]
    if optimizer is not None:
        made = optimisers.own(optimizer, network)
        return State(network, made, tally, classes=classes, made=optimisers.numbers(made))
    built = optimisers.named(
        config.optimizer,
        network,
        lr=config.lr.at(1, config.epochs),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        no_decay=config.no_decay,
    )
    return State(network, built, tally, classes=classes)


def _network(facts: dict[str, Any], model: nn.Module | own.Make | None, fetch: bool) -> nn.Module:
    """The network that facts describe, or the caller's own behind their normalisation."""
    if facts["normalize"] and models.has_weights(facts["name"]):
        raise UserError(f"{facts['name']} brings the normalisation of its weights. Leave out --normalize.")
    sizes = {"num_classes": facts["num_classes"], "channels": facts["channels"], "size": tuple(facts["size"])}
    if model is None:
        return models.build(facts["name"], **sizes, normalize=facts["normalize"], pretrained=fetch)
    if not isinstance(model, nn.Module):
        return models.with_normalisation(own.call(model, facts["name"], **sizes), facts["normalize"], sizes["channels"])
    return models.with_normalisation(own.copied(model), facts["normalize"], sizes["channels"])


def engine_for(
    config: Config,
    state: State,
    data: Dataset,
    device: torch.device,
    kind: engines.EngineKind,
    *,
    world: World = ALONE,
    **how: Any,
) -> Engine:
    """The engine that trains what `config` says; `how` goes to `engine.prepare` as it is."""
    if world.grouped:
        how = {"exchange": Mean(world, device, state.model), **how}
    if config.sync_bn and world.grouped:
        synchronise(state.model, world)
        how = {"plain_because": "batch-norm is synchronised", **how}
    return engines.prepare(
        state.model,
        state.optimizer,
        config.objective.loss,
        batch=world.share.size(config.batch_size),
        shape=(data.channels, *data.size),
        classes=data.num_classes,
        device=device,
        half=config.precision == "bf16",
        kind=kind,
        ema=config.ema,
        images=as_pixels(data.train.head(_PROBE).x.to(device)),
        fixed_sizes=config.objective.fixed_sizes,
        soft=_soft(config),
        clip=config.clip,
        norm=config.objective.norm,
        **how,
    )


def check_parts(model: nn.Module, training: Training, config: Config, world: World) -> None:
    """Refuse batches that leave a process without images, or batch-norm with one image."""
    size, full = config.batch_size, min(config.batch_size, len(training))
    if isinstance(training, Passing) and world.size > 1:
        if not training.repeats:
            raise UserError(
                "this loader gives other batches in every pass, so that processes would not see the same. Give a "
                "map-style Dataset, or let its draws come from torch, numpy or random."
            )
        if config.sync_bn:
            raise UserError("--sync-bn needs batches of one size, which a loader's own need not be. Give a Dataset.")
    if isinstance(training, Passing):
        size = full = training.largest
    if Share(world.size - 1, world.size).size(full) == 0:
        raise UserError(
            f"a batch of {full} images leaves some of {world.size} processes without two images. Use --batch-size "
            f"{2 * world.size} or more, or fewer processes."
        )
    if not isinstance(training, Passing):
        _check_last_batch(model, len(training), size)
    last = len(training) % size or size
    if config.sync_bn and not isinstance(training, Passing) and Share(world.size - 1, world.size).size(last) == 0:
        raise UserError(
            f"--sync-bn needs two images on every process in every batch, and the last of {len(training)} images has "
            f"{last} for {world.size} processes. Use another --batch-size."
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
