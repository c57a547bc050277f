"""Estimated cost of a job on one H200, from the times of an attack step and of an update. Rounded; never a result.

An epoch takes batches x (attack steps + update). Friendly training counts as 0.75 K steps at the full batch: late steps
run on few images and cost more than their share (ResNet-18 at 5.7 of 10 BPs takes 0.72 K).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sparring.evaluation.protocols import PROTOCOLS, AutoAttackSuite, PGDAttack
from sparring.models import seconds_on_a_cpu
from sparring.objectives import Progress
from sparring.paper.plan import Job, remaining, state
from sparring.paper.specs import Mixture, Robustness
from sparring.training.config import Config

# Milliseconds at batch 128 of 32x32 images: (attack step, update). Measured for small_cnn, resnet18 and wrn-34-10; the
# others are scaled by multiply-adds.
_STEP = {
    "tiny_cnn": (0.3, 1.0),
    "small_cnn": (0.30, 0.86),
    "resnet18": (0.91, 2.2),
    "preact_resnet18": (0.91, 2.2),
    "wrn-40-4": (1.9, 3.2),
    "wrn-32-10": (7.6, 13.7),
    "wrn-34-10": (7.6, 13.7),
    "wrn-58-10": (14.1, 25.7),
}
_IMAGES = {"cifar10": 49_000, "svhn": 72_257, "digits": 1_227, "tiny-imagenet": 99_000}
_TESTS = {"cifar10": 10_000, "svhn": 26_032, "digits": 450}
_SHAPES = {"digits": (1, (8, 8)), "tiny-imagenet": (3, (64, 64))}  # channels, size; of the others 3 and 32x32
_START = 25.0  # seconds until the engine is ready
_AUTOATTACK = 0.013  # seconds per image for ResNet-18 (127 s for 10,000 images)
_FRIENDLY = 0.75
_LARGER = 0.8  # time per image at batch 256 or more, relative to 128 (measured: 0.81 and 0.72)


def training(config: Config) -> float:
    """Seconds to train a run."""
    step, update = _step(config)
    if "trades" in config.objective.name or "mart" in config.objective.name:
        update *= 2  # two forward passes
    larger = _LARGER if config.batch_size >= 256 else 1.0
    return _START + config.epochs * _images(config) / 128 * larger * (_steps(config) * step + update) / 1000


def _step(config: Config) -> tuple[float, float]:
    """Milliseconds of an attack step and of an update, by the network and the size of the images."""
    step, update = _STEP.get(config.model, _STEP["wrn-34-10"])
    larger = max(1.0, math.prod(_shape(config)[1]) / 32**2)
    return step * larger, update * larger


def _shape(config: Config) -> tuple[int, tuple[int, int]]:
    """Channels and size of the images of a data set."""
    return _SHAPES.get(config.data, (3, (32, 32)))


def _steps(config: Config) -> float:
    """Attack steps per image, as equivalent steps of a full batch."""
    most = config.objective.most_backprops
    tau = config.objective.metrics(Progress(1, config.epochs)).get("tau", most)
    return most * (_FRIENDLY if tau < most else 1.0)


def _images(config: Config) -> float:
    """The number of training images: all, or those of the named classes (cifar10:bird+deer)."""
    name, _, classes = config.data.partition(":")
    return _IMAGES.get(name, 50_000) * (len(classes.split("+")) / 10 if classes else 1.0)


def measuring(job: Job) -> float:
    """Seconds to measure a trained run."""
    if job.config is None:
        return 5.0
    step, _ = _step(job.config)
    measure = job.row.measure
    if isinstance(measure, Mixture):
        return 20.0
    if not isinstance(measure, Robustness):
        return 0.0
    steps, images, autoattack = _attacks(job, measure)
    return steps * images / 128 * step / 1000 + autoattack * _AUTOATTACK * step / _STEP["resnet18"][0]


def _attacks(job: Job, measure: Robustness) -> tuple[int, int, int]:
    """What a measurement runs: steps of PGD, the images they run on, and images under AutoAttack."""
    assert job.config is not None
    protocol = PROTOCOLS[measure.protocol]
    images = min(filter(None, (job.limit, protocol.limit, _TESTS.get(job.config.data, 10_000))))
    steps = sum(attack.steps for attack in protocol.attacks if isinstance(attack, PGDAttack))
    suites = sum(isinstance(attack, AutoAttackSuite) for attack in protocol.attacks)
    return steps, images, min(measure.autoattack, job.limit or measure.autoattack) + suites * images


def seconds(jobs: Iterable[Job]) -> float:
    """Seconds for all jobs; a run that several of them share counts once."""
    each = list(jobs)
    return _sum(each, each, _START)


def left(jobs: Iterable[Job], *, start: float = _START) -> float:
    """Seconds for what is still to do. For jobs of which nothing is done it equals `seconds`.

    Args:
        start: seconds until the engine is ready; 0 on a CPU.
    """
    each = remaining(list(jobs))
    return _sum([job for job in each if state(job) != "trained"], each, start)


def on_a_cpu(jobs: Iterable[Job]) -> float:
    """Seconds for what is still to do, on a CPU. An input gradient counts as two forward passes, an update as three."""
    each = remaining(list(jobs))
    configs = {job.folder: job.config for job in each if job.config is not None and state(job) != "trained"}
    train = sum(c.epochs * _images(c) * _forward(c) * (2 * _steps(c) + 3) for c in configs.values())
    return train + sum(map(_measuring_on_a_cpu, each))


def _measuring_on_a_cpu(job: Job) -> float:
    """Seconds to measure a job on a CPU. AutoAttack takes roughly 1,500 gradients per image."""
    if job.config is None or not isinstance(job.row.measure, Robustness):
        return 60.0
    steps, images, autoattack = _attacks(job, job.row.measure)
    return 2 * _forward(job.config) * (steps * images + 1500 * autoattack)


def _forward(config: Config) -> float:
    return seconds_on_a_cpu(config.model, *_shape(config))


def _sum(to_train: Iterable[Job], to_measure: Iterable[Job], start: float) -> float:
    configs = {job.folder: job.config for job in to_train if job.config is not None}
    return sum(training(config) - _START + start for config in configs.values()) + sum(map(measuring, to_measure))


def share_out(jobs: Iterable[Job], count: int) -> list[list[Job]]:
    """The jobs divided among at most `count` processes, with about the same work each.

    A share consists of whole rows, or of whole seeds if there are more seeds than rows, so that a command can name it.
    """
    each = list(jobs)
    by_row = len({job.row.name for job in each}) >= len({job.seed for job in each})
    pieces: dict[str | int, list[Job]] = {}
    for job in each:
        pieces.setdefault(job.row.name if by_row else job.seed, []).append(job)
    shares: list[list[Job]] = [[] for _ in range(min(count, len(pieces)))]
    for piece in sorted(pieces.values(), key=left, reverse=True):
        min(shares, key=left).extend(piece)
    return shares


def spell(duration: float) -> str:
    """'40 s', '25 min', '7 h', '12 days': rounded to what an estimate is worth."""
    if duration < 90:
        return f"{max(5, round(duration / 5) * 5)} s"
    if duration < 5400:
        return f"{round(duration / 60)} min"
    return f"{round(duration / 3600)} h" if duration < 48 * 3600 else f"{round(duration / 86400)} days"
