"""What several GPUs would gain: the times of one step here, and a model of the time at other sizes.

A step of N processes is the attack, which exchanges nothing, the update, and one all-reduce of a bucket that holds the
gradients and the running statistics. `measure` times these with the processes that there are; `predict` adds the
all-reduce of a ring to the times of one process. A prediction leaves out that processes wait for the slowest attack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sparring.bench.timing import timed
from sparring.bench.training import fat_of
from sparring.data import Dataset, Split, batches, in_memory
from sparring.engine import EngineKind
from sparring.engine.update.exchange import statistics
from sparring.objectives import KTauPGD, Progress
from sparring.schedules import constant
from sparring.seeds import generator
from sparring.training import start
from sparring.training.all_reduce import Mean
from sparring.training.config import Config, model_facts
from sparring.training.distributed import ALONE, World

SIZES = (8, 64, 512)  # GPUs of the predictions


@dataclass(frozen=True)
class Network:
    """What a cluster's links are taken to be: eight GPUs a machine, and one 400-Gb/s adapter per GPU between them."""

    per_machine: int = 8
    inside: float = 300e9  # bytes a second, of an all-reduce within a machine
    between: float = 40e9  # bytes a second per GPU, between machines
    latency: float = 20e-6  # seconds of one all-reduce within a machine
    hop: float = 10e-6  # seconds more for every doubling of machines


@dataclass(frozen=True)
class Costs:
    """The times of one process at its own batch, and the bytes that an update exchanges."""

    images: int  # per process
    attack: float  # seconds
    update: float  # seconds, without an exchange
    exchanged: int  # bytes


def all_reduce_seconds(exchanged: int, gpus: int, network: Network) -> float:
    """An all-reduce in two levels: within every machine, and of each GPU's part between the machines."""
    here = min(gpus, network.per_machine)
    machines = math.ceil(gpus / network.per_machine)
    inside = 2 * (here - 1) / here * exchanged / network.inside + network.latency if here > 1 else 0.0
    part = exchanged / here
    between = 2 * (machines - 1) / machines * part / network.between + network.hop * math.ceil(math.log2(machines))
    return inside + (between if machines > 1 else 0.0)


def predict(costs: Costs, gpus: int, network: Network | None = None) -> dict[str, float]:
    """Milliseconds of the all-reduce, images a second, and the share of N times one GPU's speed that is left."""
    alone = costs.attack + costs.update
    added = all_reduce_seconds(costs.exchanged, gpus, network or Network())
    return {
        "gpus": gpus,
        "batch": gpus * costs.images,
        "all_reduce_ms": 1e3 * added,
        "images_per_second": gpus * costs.images / (alone + added),
        "efficiency": alone / (alone + added),
    }


def measure(
    config: Config, data: Dataset, device: torch.device, world: World, *, kind: EngineKind = "auto", repeats: int = 20
) -> dict[str, Any]:
    """Seconds of an attack of K steps, of an update alone and with its exchange, and of the exchange by itself.

    `config.batch_size` is the batch of one process. Every process calls this function with the same arguments.
    """
    facts, images = model_facts(config, data), in_memory(data.train)
    size = config.batch_size
    x, y = next(iter(batches(Split(images.x[:size], images.y[:size]).to(device), size)))
    objective = fat_of(config)
    search = replace(objective, tau=constant(objective.steps)).search(Progress(1, 1))
    assert isinstance(search, KTauPGD)
    how: dict[str, Any] = {"repeats": repeats}
    seconds: dict[str, float] = {}
    for name, group in (("alone", ALONE), ("together", world)):
        state = start.begin(config, facts, device)
        wide = replace(config, batch_size=size * group.size)
        engine = start.engine_for(wide, state, data, device, kind, world=group)
        state.model.train()
        exchange = engine.exchange if isinstance(engine.exchange, Mean) else None
        if exchange is not None:
            exchange.begin(size, size * group.size, torch.zeros((), device=device), stop=False)
        with engine.tuned():
            if name == "alone":
                draws = generator(device, config.seed, 0)
                seconds["attack"] = timed(lambda e=engine, d=draws: e.attack(search, x, y, d), device, **how).median  # type: ignore[misc]
            seconds[f"update_{name}"] = timed(lambda e=engine: e.update(x, x, y, 0.0), device, **how).median  # type: ignore[misc]
        engine.release()
    tensors = [torch.zeros_like(weight) for weight in (*state.model.parameters(), *statistics(state.model))]
    exchanged = sum(tensor.numel() for tensor in tensors) * 4 + 12  # fp32; the loss and two counts
    if exchange is not None:
        seconds["exchange"] = timed(lambda: exchange.mean(tensors), device, **how).median
    costs = Costs(size, seconds["attack"], seconds["update_alone"], exchanged)
    efficiency = (costs.attack + costs.update) / (costs.attack + seconds["update_together"])
    return {
        "processes": world.size,
        "backend": world.backend,
        "images_per_process": size,
        "exchanged_bytes": exchanged,
        "seconds": seconds,
        "efficiency": efficiency,
        "n": repeats,
        "predicted": predictions(costs),
        "assumed": asdict(Network()),
    }


def predictions(costs: Costs, sizes: Sequence[int] = SIZES) -> list[dict[str, float]]:
    """`predict` at several sizes."""
    return [predict(costs, gpus) for gpus in sizes]


def in_words(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of a table."""
    seconds, processes = found["seconds"], found["processes"]
    alone, together = (f"{1e3 * seconds[f'update_{name}']:.3f} ms" for name in ("alone", "together"))
    rows = [
        ("processes", f"{processes} ({found['backend'] or 'no group'}), {found['images_per_process']} images each"),
        ("attack of K steps", f"{1e3 * seconds['attack']:.3f} ms"),
        ("update", f"{alone}, with its exchange {together}"),
        ("exchanged", f"{found['exchanged_bytes'] / 1e6:.1f} MB an update"),
        ("measured efficiency", f"{found['efficiency']:.1%} of {processes} times one process"),
    ]
    for row in found["predicted"]:
        speed = f"{row['images_per_second']:,.0f} images/s, all-reduce {row['all_reduce_ms']:.2f} ms"
        rows.append((f"predicted, {row['gpus']:.0f} GPUs", f"{row['efficiency']:.1%}, {speed}"))
    return rows
