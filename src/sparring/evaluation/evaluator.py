"""The evaluation, top to bottom: check, natural accuracy, every attack once, worst case, doubts.

Accuracy is taken at the final iterate, as in the paper: an attack is run on every example, also on one that is
misclassified without attack, and the prediction at the last iterate counts. The result also has the per-example worst
case over all attacks. Verdicts are always fp32 (`verdicts`); gradients may be bf16 (`gradient_model`). Finished
verdicts are kept on disk (`cache`), and nothing is computed twice: attacks that protocols share run once, and restarts
attack only the examples that are still classified correctly.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparring._version import __version__
from sparring.attacks.checks import Model, call, check_model
from sparring.attacks.eval_mode import eval_mode, frozen
from sparring.attacks.threat import Norm, refuse_tensors
from sparring.data import Dataset, as_test_split
from sparring.engine import on
from sparring.errors import RunFailed, UserError
from sparring.evaluation.autoattack import run_autoattack
from sparring.evaluation.cache import Store, fingerprint, open_store
from sparring.evaluation.estimate import announcement
from sparring.evaluation.gradient_model import GradientPrecision
from sparring.evaluation.progress import BySteps, Task, meter
from sparring.evaluation.protocols import Protocol, Settings, UniqueAttack, find, radius_of, unique_attacks
from sparring.evaluation.result import WORST, AttackResult, Repeat, Result, check_about
from sparring.evaluation.sanity import measure
from sparring.evaluation.starts import Starts, pgd_from
from sparring.evaluation.subject import Subject, check_tensors, prepare
from sparring.evaluation.verdicts import allows_tf32, exact, is_correct
from sparring.seeds import check_seed
from sparring.training.distributed import ALONE, World

_log = logging.getLogger("sparring")
_NATURAL = Settings(eps=0.0, loss="")
_PROBE = 16  # images by whose logits a model is told from another one with the same weights
_DOUBTED = 256  # images that the sanity checks run on


def evaluate(
    model: Model,
    x: Any,
    y: Any = None,
    protocol: str | Protocol | Sequence[str | Protocol] = "dat",
    *,
    eps: float | None = None,
    norm: Norm = "linf",
    limit: int | None = None,
    seeds: int = 1,
    seed: int = 0,
    restarts: int | None = None,
    precision: GradientPrecision = "fp32",
    batch_size: int | None = None,
    store: Path | str | None = None,
    doubts: bool = True,
    progress: bool = False,
    compiled: bool = False,
    about: Mapping[str, Any] | None = None,
    world: World = ALONE,
) -> Result:
    """Measure how well a model withstands attack.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode and left as it was found.
        x: images, float in [0, 1] or uint8, a tensor on any device or a numpy array: batches are moved to the model's.
            Without y: (x, y), a DataLoader, a torch Dataset, a `sparring.data.Dataset` or a data set's name, of which
            the test images are used.
        y: int64 labels.
        protocol: a name (dat, trades, trades-random, mart, figure, figure-svhn, figure-twice, tau, fastat, quick,
            autoattack) or several.
        eps: overrides the radius of every protocol; step sizes given relative to eps scale with it, absolute ones stay.
        norm: of every attack, "linf" or "l2". In L2 give `eps`: the protocols' own radii are for L-infinity, and all
            their step sizes scale with it.
        limit: evaluate on the first `limit` images only.
        seeds: repeats of attacks with a random start, with seeds `seed`, `seed` + 1, ...: mean and standard deviation.
            AutoAttack runs once, with the first seed.
        restarts: random starts per seed; an example counts as robust if it withstands all of them.
        precision: of the gradients, "fp32" or "bf16". Verdicts are fp32 either way.
        batch_size: the largest batch; as many images as fit unless given. Only AutoAttack's draws depend on it.
        store: a folder for finished verdicts: an interrupted evaluation, called again, continues where it stopped.
        doubts: whether to check for signs that the numbers mislead (`evaluation.sanity`), on up to 256 of the images.
        progress: whether to show a progress bar on standard error; without a terminal, print a line a minute instead.
        compiled: whether to torch.compile the bf16 copy: worth the compile time for AutoAttack on a GPU.
        about: the caller's own facts to keep in the result, as JSON: where model and data come from.
        world: processes that judge the images together (`training.distributed.joined`), each calling this function with
            the same arguments; the first one's result is complete.
    """
    with world.together():
        protocols = find(protocol)
        attacks = unique_attacks(protocols, eps=eps, restarts=restarts, norm=norm)
        refuse_tensors(eps=eps)
        for name, given in (("limit", limit), ("seeds", seeds), ("restarts", restarts), ("batch_size", batch_size)):
            if given is not None and type(given) is not int:
                raise UserError(f"{name} must be a whole number, got {given!r}.")
        check_model(model)
        if store is not None and not isinstance(store, str | Path):
            raise UserError(f"store must be the path of a folder, got {type(store).__name__}. Write 'verdicts'.")
        check_about(about)
        about = _origin(x) | dict(about or {})
        x, y = _images(x, y, limit)
        check_tensors(x, y)
        x, y = _cut(x, y, limit=limit, protocols=protocols)
        if seeds < 1:
            raise UserError(f"seeds must be at least 1, got {seeds}.")
        check_seed(seed)
        check_seed(seed + seeds - 1)
        if restarts is not None and restarts < 1:
            raise UserError(f"restarts must be at least 1, got {restarts}.")
    with ExitStack() as held:
        held.enter_context(eval_mode(model))
        held.enter_context(frozen(model))
        how: dict[str, Any] = {"precision": precision, "batch_size": batch_size, "compiled": compiled}
        with world.together():
            subject = prepare(model, x, y, share=world.share, **how)
        if (batches := math.ceil(len(x) / subject.batch)) < world.size and world.first:
            _log.warning(
                f"{batches} batches of up to {subject.batch} images for {world.size} processes: --batch-size "
                f"{math.ceil(len(x) / world.size)} would give each of them one."
            )
        if world.grouped and isinstance(model, nn.Module):
            settings = repr((attacks, seeds, seed, how, subject.precision))
            world.agree({"model or images": fingerprint(model, x, y), "settings": settings})
        held.enter_context(on(subject.device))
        held.enter_context(_own_randomness(subject.device, seed))
        with world.together():
            verdicts = Store(None, len(x), world)
            if store is not None:
                verdicts = open_store(Path(store), model, x, y, world, logits=_probed(subject))
        task = held.enter_context(meter(progress and world.first))
        natural = _natural(subject, verdicts, task, norm)
        if progress and world.first and subject.device.type == "cpu":
            how_long = announcement(
                natural.seconds / len(x),
                [attack.settings for attack in attacks],
                seeds=seeds,
                images=subject.count(torch.arange(len(x))),
                checked=min(len(x), _DOUBTED) if doubts else 0,
                threads=torch.get_num_threads(),
            )
            if how_long:
                print(how_long, flush=True)
        records = {natural.name: natural}
        for attack in attacks:
            run = _autoattack if attack.settings.loss == "autoattack" else _pgd
            seeds_here = range(seed, seed + (seeds if attack.settings.random else 1))
            records[attack.name] = run(subject, attack, natural.correct, seeds_here, verdicts, task)
    radii = sorted({radius_of(protocol, eps=eps, norm=norm) for protocol in protocols})
    for radius in radii:
        name = WORST if radius == radii[-1] else f"{WORST}@{radius:.6g}"
        records[name] = _worst(name, radius, norm, seed, [r for r in records.values() if not r.name.startswith(WORST)])
    found: tuple[dict[str, Any], ...] = ()
    if doubts and world.first:
        with meter(progress) as task:  # outside eval_mode: the checks must see the mode the caller's model is in
            found = _doubts(model, subject, records, eps=radii[-1], norm=norm, seed=seed, task=task)
    return Result(records, len(x), _software(subject.device), about, found, y.detach().cpu().clone())


def _images(x: Any, y: Any, limit: int | None) -> tuple[Any, Any]:
    """Images and labels as tensors. Tensors are taken as they are."""
    if isinstance(y, str | Protocol):
        raise UserError(f"y is {y!r}, which looks like a protocol. Write evaluate(model, data, protocol=...).")
    if y is None:
        if isinstance(x, Tensor | np.ndarray):
            raise UserError("there are no labels. Give evaluate(model, x, y), or data: (x, y), a DataLoader, a name.")
        if isinstance(x, tuple) and len(x) == 2 and all(isinstance(part, Tensor) for part in x):
            return x
        found = as_test_split(x, limit=limit)
        return found.x, found.y
    if isinstance(x, DataLoader) or isinstance(y, DataLoader):
        raise UserError("a DataLoader gives images and labels. Give it alone: evaluate(model, loader).")
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x, y
    if not isinstance(x, Tensor | np.ndarray):
        raise UserError(f"x must be a tensor or an array, got {type(x).__name__}. Write evaluate(model, x, y).")
    found = as_test_split((x, y))
    return found.x, found.y


def _origin(data: object) -> dict[str, Any]:
    """What a result records of where its images come from, where the data say it."""
    if isinstance(data, Dataset):
        return {"data": data.name, "classes": list(data.classes)}
    return {"data": data} if isinstance(data, str) else {}


def _cut(x: Tensor, y: Tensor, *, limit: int | None, protocols: Sequence[Protocol]) -> tuple[Tensor, Tensor]:
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 image, got {limit}. Leave it out to use all.")
    if limit is None:  # protocols' own limits apply only if every protocol has one
        own = [protocol.limit for protocol in protocols]
        limit = None if None in own else max(limit for limit in own if limit is not None)
    return x[:limit], y[:limit]


@torch.no_grad()
def _probed(subject: Subject) -> Tensor:
    """The model's logits on a few images; the global random state is where it was."""
    images, _ = subject.take(torch.arange(min(len(subject.x), _PROBE)))
    with exact(subject.device), torch.random.fork_rng(devices=[subject.device] if images.is_cuda else []):
        return call(subject.model, images)


def _natural(subject: Subject, store: Store, task: Task, norm: Norm) -> AttackResult:
    """The accuracy on unperturbed images."""
    ledger = store.open("natural", _NATURAL, precision="fp32", seed=0, part="all")
    rows = torch.nonzero(~ledger.judged)[:, 0]
    advance = task("natural", subject.count(rows))
    began = time.perf_counter()
    for done, right in subject.each(rows, lambda x, y, _rows: is_correct(subject.model, x, y)):
        ledger.enter(done, right, time.perf_counter() - began)
        began = time.perf_counter()
        advance(len(done))
    ledger.join(store.world)
    precision = "fp64" if subject.dtype == torch.float64 else "fp32"
    return _record("natural", replace(_NATURAL, norm=norm), (), precision, [Repeat(0, ledger.correct, ledger.seconds)])


def _pgd(
    subject: Subject, attack: UniqueAttack, _natural: Tensor, seeds: Sequence[int], store: Store, task: Task
) -> AttackResult:
    """One PGD attack under every seed."""
    settings, repeats = attack.settings, []
    for seed in seeds:
        correct, seconds = torch.ones(len(subject.x), dtype=torch.bool), 0.0
        for restart in range(settings.restarts):
            part = f"restart{restart}"
            # Draws and verdicts of a restart do not depend on how many restarts follow.
            one = replace(settings, restarts=1)
            ledger = store.open(attack.name, one, precision=subject.precision, seed=seed, part=part)
            rows = torch.nonzero(correct & ~ledger.judged)[:, 0]
            advance = task(f"{attack.name} seed {seed}" if settings.random else attack.name, subject.count(rows))
            # Draws depend on what the attack does, not on its name; at another eps they are the same, scaled.
            purpose = f"{settings.loss} {settings.steps} {part}"
            starts = Starts(settings.start, eps=settings.eps, seed=seed, purpose=purpose, norm=settings.norm)
            by_step = BySteps(advance, settings.steps)
            work = partial(_after_pgd, subject, settings, starts, by_step)
            began = time.perf_counter()
            for done, right in subject.each(rows, work):
                ledger.enter(done, right, time.perf_counter() - began)
                began = time.perf_counter()
                by_step.finish(len(done))
            ledger.join(store.world)
            correct &= ledger.correct
            seconds += ledger.seconds
        repeats.append(Repeat(seed, correct, seconds))
    return _record(attack.name, settings, _served(attack), subject.precision, repeats)


def _after_pgd(
    subject: Subject, s: Settings, starts: Starts, by_step: BySteps, x: Tensor, y: Tensor, rows: Tensor
) -> Tensor:
    """Whether each example is classified correctly at the final iterate."""
    begin = starts(x, rows)
    how: dict[str, Any] = {"eps": s.eps, "step_size": s.step_size, "steps": s.steps, "loss": s.loss, "norm": s.norm}
    x_adv = pgd_from(subject.fast, x, y, start=begin, each_step=lambda: by_step(len(x)), **how)
    return is_correct(subject.model, x_adv, y)


def _autoattack(
    subject: Subject, attack: UniqueAttack, natural: Tensor, seeds: Sequence[int], store: Store, task: Task
) -> AttackResult:
    settings, seed = attack.settings, seeds[0]

    def ledger_of(part: str) -> Any:
        return store.open(attack.name, settings, precision=subject.precision, seed=seed, part=part)

    how: dict[str, Any] = {"seed": seed, "ledger_of": ledger_of, "task": task, "world": store.world}
    repeat, detail = run_autoattack(subject, settings, natural, **how)
    return _record(attack.name, settings, _served(attack), subject.precision, [repeat], detail)


def _served(attack: UniqueAttack) -> tuple[str, ...]:
    return tuple(f"{name}@{protocol}" for name, protocol in attack.serves)


def _record(
    name: str, s: Settings, serves: tuple[str, ...], precision: str, repeats: Sequence[Repeat], detail: Any = None
) -> AttackResult:
    n = len(repeats[0].correct)
    facts = (n, s.eps, s.steps, s.step_size, s.loss, s.start, s.restarts)
    return AttackResult(name, serves, *facts, precision, tuple(repeats), detail or {}, s.norm)


def _worst(name: str, eps: float, norm: Norm, seed: int, records: Sequence[AttackResult]) -> AttackResult:
    """Correct without attack and under every attack of this radius or less."""
    inside = [record for record in records if record.eps <= eps]
    correct = torch.stack([record.correct for record in inside]).all(dim=0)
    repeat = Repeat(seed, correct, sum(record.seconds for record in inside))
    precision = inside[-1].precision
    settings = Settings(eps=eps, loss="", norm=norm)
    return _record(name, settings, (), precision, [repeat], {"over": [r.name for r in inside]})


def _doubts(
    model: Model,
    subject: Subject,
    records: Mapping[str, AttackResult],
    *,
    eps: float,
    norm: Norm,
    seed: int,
    task: Task,
) -> tuple[dict[str, Any], ...]:
    """The doubts about these results, found on as many images as fit into memory."""
    count = min(len(subject.x), _DOUBTED)
    task("sanity checks", None)
    while True:
        try:
            return _doubts_on(count, model, subject, records, eps=eps, norm=norm, seed=seed)
        except torch.OutOfMemoryError:
            if count == 1:
                raise RunFailed("one image does not fit into the memory of the device.") from None
        count //= 2  # outside the handler, whose traceback keeps the tensors alive
        torch.cuda.empty_cache()


def _doubts_on(
    count: int,
    model: Model,
    subject: Subject,
    records: Mapping[str, AttackResult],
    *,
    eps: float,
    norm: Norm,
    seed: int,
) -> tuple[dict[str, Any], ...]:
    rows = torch.linspace(0, len(subject.x) - 1, count).round().long()  # spread out: images may be sorted by class
    x, y = subject.take(rows)
    # Only attacks of the same radius can be compared; of two with the same name, the first.
    here = [record for record in records.values() if record.eps == eps and not record.name.startswith(WORST)]
    correct = {record.name.partition("@")[0]: record.correct[rows] for record in reversed(here)}
    correct[WORST] = records[WORST].correct[rows]  # broken by any attack, including those that are not compared
    found = measure.doubts(model, x, y, eps=eps, norm=norm, correct=correct, seed=seed)
    return tuple({"name": d.name, "why": d.why, "evidence": d.evidence, "page": d.page} for d in found)


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global random state, from which a stochastic model draws; restore the caller's afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _software(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "sparring": __version__,
        "torch": str(torch.__version__),
        "pyautoattack": importlib.metadata.version("pyautoattack"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{device.type}: {name}",
        "tf32": str(allows_tf32(device)),  # of fp32 gradients; verdicts are exact
    }
