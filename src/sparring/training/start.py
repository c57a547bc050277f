"""What a run begins with: the network, its optimiser, the engine, and whether its batches can be divided.

Knows no folder and no epoch. The global random state is left alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from sparring import engine as engines
from sparring import models
from sparring.attacks.failures import check_values
from sparring.data import Dataset, Passing, Training, as_pixels, mixes_labels
from sparring.engine import Engine
from sparring.errors import UserError
from sparring.models import own
from sparring.seeds import Draw, derive_seed, seeded
from sparring.shares import Share
from sparring.training import optimisers
from sparring.training.all_reduce import Mean
from sparring.training.config import Config
from sparring.training.distributed import ALONE, World
from sparring.training.optimisers import MakeOptimizer
from sparring.training.state import State, Tally
from sparring.training.sync_bn import synchronise

_PROBE = 64  # training images on which the engine checks its copy of the network


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
        network = _network(facts, model, fetch)
        check_values(network)
        network = network.to(device)
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


def own_draws(
    config: Config, device: torch.device, epoch: int, step: int, rank: int = 0
) -> AbstractContextManager[None]:
    """Seeds, inside a block, for what a network of the caller's own draws (dropout). Built-in ones draw nothing.

    Such draws belong to the process, not to the image: with another number of processes they are others.
    """
    if models.built_in(config.model):
        return nullcontext()
    return seeded(device, config.seed, Draw.NETWORK, epoch, step, *((rank,) if rank else ()))


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
        half=config.precision != "fp32",
        fp8=config.precision == "fp8",
        kind=kind,
        ema=config.ema,
        images=as_pixels(data.train.head(_PROBE).x.to(device)),
        fixed_sizes=config.objective.fixed_sizes,
        soft=soft(config),
        clip=config.clip,
        norm=config.objective.norm,
        **how,
    )


def soft(config: Config) -> bool:
    """Whether updates come with soft targets: labels are smoothed or mixed."""
    return config.label_smoothing > 0 or mixes_labels(config.augment)


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
    if isinstance(training, Passing):
        if training.smallest == 1 and _has_batch_norm(model):
            raise one_image("a batch of the loader")
    else:
        _check_last_batch(model, len(training), size)
    last = len(training) % size or size
    if config.sync_bn and not isinstance(training, Passing) and Share(world.size - 1, world.size).size(last) == 0:
        raise UserError(
            f"--sync-bn needs two images on every process in every batch, and the last of {len(training)} images has "
            f"{last} for {world.size} processes. Use another --batch-size."
        )


def _check_last_batch(model: nn.Module, images: int, batch_size: int) -> None:
    """Refuse a last batch of one image: batch-norm has no statistics of one value."""
    if _has_batch_norm(model) and (batch_size == 1 or images % batch_size == 1):
        larger = next((size for size in range(batch_size + 1, images + 1) if images % size != 1), images)
        raise UserError(
            f"the last batch of {images} training images would hold one image, and batch-norm needs two. "
            f"Use --batch-size {larger}."
        )


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def one_image(batch: str) -> UserError:
    """The error for a loader's batch of one image, before batch-norm."""
    return UserError(
        f"{batch} holds one image, and batch-norm needs two. Give the DataLoader another batch_size, or drop_last=True."
    )
