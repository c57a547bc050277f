"""The evaluation, top to bottom: check, natural accuracy, every attack once, worst case, doubts.

Accuracy is taken at the final iterate, as in the paper: an attack is run on every example, also on one that is wrong
naturally, and where it ends decides. Beside it stands the per-example worst case over everything run. Verdicts are fp32
always (`verdict`); gradients may be bf16 (`fast`). What is finished is kept in `store` (`store`), and nothing known is
computed twice: attacks that protocols share run once, restarts attack only what still stands.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring._version import __version__
from sparring.attacks.checks import Model, quiet
from sparring.engine import on
from sparring.errors import RunFailed, UserError
from sparring.evaluation.autoattack import run_autoattack
from sparring.evaluation.cache import Store, open_store
from sparring.evaluation.gradient_model import Precision, frozen
from sparring.evaluation.progress import Task, meter
from sparring.evaluation.protocols import Protocol, Settings, UniqueAttack, find, unique_attacks
from sparring.evaluation.result import WORST, AttackResult, Repeat, Result
from sparring.evaluation.starts import Starts, climb
from sparring.evaluation.subject import Subject, prepare
from sparring.evaluation.verdicts import rounds, stands
from sparring.seeds import check_seed

_NATURAL = Settings(eps=0.0, loss="")
_DOUBTED = 256  # images that the self-checks look at


def evaluate(
    model: Model,
    x: Tensor,
    y: Tensor,
    protocol: str | Protocol | Sequence[str | Protocol] = "dat",
    *,
    eps: float | None = None,
    limit: int | None = None,
    seeds: int = 1,
    seed: int = 0,
    restarts: int | None = None,
    precision: Precision = "fp32",
    batch_size: int | None = None,
    store: Path | None = None,
    doubts: bool = True,
    progress: bool = False,
    compiled: bool = False,
    about: Mapping[str, Any] | None = None,
) -> Result:
    """How well a model withstands attack.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode, left as it was found.
        x: images, float in [0, 1] or uint8, on any device: batches are moved to the model's.
        y: int64 labels.
        protocol: a name (dat, trades, trades-random, mart, figure, figure-svhn, tau, quick, autoattack) or several.
        eps: another radius for every protocol; step sizes that are parts of eps follow, absolute ones stay.
        limit: the first so many images.
        seeds: how often attacks with a random start are repeated, with seeds `seed`, `seed` + 1, ...: mean and spread.
            AutoAttack runs once, with the first.
        restarts: random starts per seed; an example stands if it stands all of them.
        precision: of the gradients, "fp32" or "bf16". Verdicts are fp32 either way.
        batch_size: the most images at once; without it as many as fit. Only AutoAttack's draws depend on it.
        store: a folder that keeps finished verdicts: a killed evaluation, called again, continues where it was.
        doubts: whether to look for signs that the numbers mislead (`evaluation.doubt`), on up to 256 of the images.
        progress: whether to show a progress bar on standard error; where that is no terminal, a line a minute is
            printed instead.
        compiled: whether to torch.compile the bf16 copy: worth its start-up time for AutoAttack on a GPU.
        about: facts of the caller to keep in the result, as JSON: where model and data come from.
    """
    protocols = find(protocol)
    planned = unique_attacks(protocols, eps=eps, restarts=restarts)
    x, y = _cut(x, y, limit=limit, protocols=protocols)
    if seeds < 1:
        raise UserError(f"seeds must be at least 1, got {seeds}.")
    check_seed(seed)
    check_seed(seed + seeds - 1)
    if restarts is not None and restarts < 1:
        raise UserError(f"restarts must be at least 1, got {restarts}.")
    with ExitStack() as held:
        held.enter_context(quiet(model))
        held.enter_context(frozen(model))
        subject = prepare(model, x, y, precision=precision, batch_size=batch_size, compiled=compiled)
        held.enter_context(on(subject.device))
        held.enter_context(_own_randomness(subject.device, seed))
        verdicts = open_store(store, model, x, y)
        task = held.enter_context(meter(progress))
        natural = _natural(subject, verdicts, task)
        records = {natural.name: natural}
        for one in planned:
            run = _autoattack if one.settings.loss == "autoattack" else _climbs
            seeds_here = range(seed, seed + (seeds if one.settings.random else 1))
            records[one.name] = run(subject, one, natural.correct, seeds_here, verdicts, task)
    radii = sorted({protocol.eps if eps is None else eps for protocol in protocols})
    for radius in radii:
        name = WORST if radius == radii[-1] else f"{WORST}@{radius:.6g}"
        records[name] = _worst(name, radius, seed, [r for r in records.values() if not r.name.startswith(WORST)])
    found: tuple[dict[str, Any], ...] = ()
    if doubts:
        with meter(progress) as task:  # another: the model has its own mode again, as a doubt about it must find it
            found = _doubts(model, subject, records, eps=radii[-1], seed=seed, task=task)
    return Result(records, len(x), _software(subject.device), dict(about or {}), found)


def _cut(x: Tensor, y: Tensor, *, limit: int | None, protocols: Sequence[Protocol]) -> tuple[Tensor, Tensor]:
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 image, got {limit}. Leave it out for all of them.")
    if limit is None:  # a protocol's own limit holds if every protocol has one
        own = [protocol.limit for protocol in protocols]
        limit = None if None in own else max(limit for limit in own if limit is not None)
    return x[:limit], y[:limit]


def _natural(subject: Subject, store: Store, task: Task) -> AttackResult:
    """Accuracy on the images themselves."""
    ledger = store.open("natural", _NATURAL, precision="fp32", seed=0, part="all")
    rows = torch.nonzero(~ledger.judged)[:, 0]
    advance = task("natural", len(rows))
    began = time.perf_counter()
    for done, right in subject.each(rows, lambda x, y, _rows: stands(subject.model, x, y)):
        ledger.enter(done, right, time.perf_counter() - began)
        began = time.perf_counter()
        advance(len(done))
    precision = "fp64" if subject.dtype == torch.float64 else "fp32"
    return _record("natural", _NATURAL, (), precision, [Repeat(0, ledger.stands, ledger.seconds)])


def _climbs(
    subject: Subject, planned: UniqueAttack, _natural: Tensor, seeds: Sequence[int], store: Store, task: Task
) -> AttackResult:
    """A gradient attack under every seed."""
    settings, runs = planned.settings, []
    for seed in seeds:
        standing, seconds = torch.ones(len(subject.x), dtype=torch.bool), 0.0
        for restart in range(settings.restarts):
            part = f"restart{restart}"
            # The first of many restarts is the only one of one: neither draws nor verdicts know how many follow.
            one = replace(settings, restarts=1)
            ledger = store.open(planned.name, one, precision=subject.precision, seed=seed, part=part)
            rows = torch.nonzero(standing & ~ledger.judged)[:, 0]
            advance = task(f"{planned.name} seed {seed}" if settings.random else planned.name, len(rows))
            # Draws follow from what the attack does, not from its name; at another eps they are the same, scaled.
            purpose = f"{settings.loss} {settings.steps} {part}"
            starts = Starts(settings.start, eps=settings.eps, seed=seed, purpose=purpose)
            work = partial(_after_climb, subject, settings, starts)
            began = time.perf_counter()
            for done, right in subject.each(rows, work):
                ledger.enter(done, right, time.perf_counter() - began)
                began = time.perf_counter()
                advance(len(done))
            standing &= ledger.stands
            seconds += ledger.seconds
        runs.append(Repeat(seed, standing, seconds))
    return _record(planned.name, settings, _served(planned), subject.precision, runs)


def _after_climb(subject: Subject, s: Settings, starts: Starts, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Whether each example is right at the final iterate."""
    begin = starts(x, rows)
    loss: Any = s.loss
    x_adv = climb(subject.fast, x, y, begin, eps=s.eps, step_size=s.step_size, steps=s.steps, loss=loss)
    return stands(subject.model, x_adv, y)


def _autoattack(
    subject: Subject, planned: UniqueAttack, natural: Tensor, seeds: Sequence[int], store: Store, task: Task
) -> AttackResult:
    settings, seed = planned.settings, seeds[0]

    def ledger_of(part: str) -> Any:
        return store.open(planned.name, settings, precision=subject.precision, seed=seed, part=part)

    run, detail = run_autoattack(subject, settings, natural, seed=seed, ledger_of=ledger_of, task=task)
    return _record(planned.name, settings, _served(planned), subject.precision, [run], detail)


def _served(planned: UniqueAttack) -> tuple[str, ...]:
    return tuple(f"{attack}@{protocol}" for attack, protocol in planned.serves)


def _record(
    name: str, s: Settings, serves: tuple[str, ...], precision: str, runs: Sequence[Repeat], detail: Any = None
) -> AttackResult:
    n = len(runs[0].correct)
    facts = (n, s.eps, s.steps, s.step_size, s.loss, s.start, s.restarts)
    return AttackResult(name, serves, *facts, precision, tuple(runs), detail or {})


def _worst(name: str, eps: float, seed: int, records: Sequence[AttackResult]) -> AttackResult:
    """Right naturally and under every attack that stayed inside the ball."""
    inside = [record for record in records if record.eps <= eps]
    correct = torch.stack([record.correct for record in inside]).all(dim=0)
    run = Repeat(seed, correct, sum(record.seconds for record in inside))
    precision = inside[-1].precision
    return _record(name, Settings(eps=eps, loss=""), (), precision, [run], {"over": [r.name for r in inside]})


def _doubts(
    model: Model, subject: Subject, records: Mapping[str, AttackResult], *, eps: float, seed: int, task: Task
) -> tuple[dict[str, Any], ...]:
    """What there is to doubt, looked for on as many images as fit into memory."""
    count = min(len(subject.x), _DOUBTED)
    task("looking for doubts", None)
    while True:
        try:
            return _doubts_on(count, model, subject, records, eps=eps, seed=seed)
        except torch.OutOfMemoryError:
            if count == 1:
                raise RunFailed("one image does not fit into the memory of the device.") from None
        count //= 2  # not in the handler, whose traceback holds the tensors
        torch.cuda.empty_cache()


def _doubts_on(
    count: int, model: Model, subject: Subject, records: Mapping[str, AttackResult], *, eps: float, seed: int
) -> tuple[dict[str, Any], ...]:
    from sparring.evaluation.sanity.checks import doubts as look

    rows = torch.linspace(0, len(subject.x) - 1, count).round().long()  # spread out: images may be sorted by class
    x, y = subject.take(rows)
    # Only attacks on this very ball can be compared with one another; of two by one name the first.
    here = [record for record in records.values() if record.eps == eps and not record.name.startswith(WORST)]
    correct = {record.name.partition("@")[0]: record.correct[rows] for record in reversed(here)}
    correct[WORST] = records[WORST].correct[rows]  # what any attack broke, those that are not compared too
    found = look(model, x, y, eps=eps, correct=correct, seed=seed)
    return tuple({"name": d.name, "why": d.why, "evidence": d.evidence, "page": d.page} for d in found)


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """A stochastic model draws from torch's global state: seeded here, and the caller's put back."""
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
        "tf32": str(rounds(device)),  # of fp32 gradients; verdicts are exact
    }
