"""AutoAttack, part by part and batch by batch, on the examples that are not broken yet.

Its accuracy is independent of other attacks: every example that is correct without attack is attacked, whatever other
attacks of the same call found. A success counts only if the caller's model, in exact fp32, is wrong there. With
gradients in bf16 or TF32 two kinds of example would escape: one broken by rounding only, and one that the rounded model
misclassifies without attack, which the pyautoattack package skips. Both are attacked again by the same part in exact
fp32, so rounding never increases the accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparring.attacks.autoattack import Version, attack_part, is_stochastic, parts
from sparring.attacks.checks import Model
from sparring.evaluation.cache import Ledger
from sparring.evaluation.progress import Task
from sparring.evaluation.protocols import Settings
from sparring.evaluation.result import Repeat
from sparring.evaluation.subject import Subject
from sparring.evaluation.verdicts import allows_tf32, exact, is_correct
from sparring.training.distributed import ALONE, World


def run_autoattack(
    subject: Subject,
    settings: Settings,
    natural: Tensor,
    *,
    seed: int,
    ledger_of: Callable[[str], Ledger],
    task: Task,
    world: World = ALONE,
) -> tuple[Repeat, dict[str, Any]]:
    """AutoAttack's verdicts, and the accuracy after each part. `natural` marks the examples correct without attack."""
    probe, _ = subject.take(torch.arange(min(len(subject.x), 64, subject.batch)))
    version: Version = world.from_first("rand" if is_stochastic(subject.model, probe) else "standard")
    correct = natural.clone()
    after: dict[str, float] = {}
    took: dict[str, float] = {}
    again, seconds = 0, 0.0
    retried = 0  # in the current batch
    for part in parts(version, classes=subject.classes):
        ledger = ledger_of(part)
        rows = torch.nonzero(correct & ~ledger.judged)[:, 0]
        advance = task(f"AutoAttack {part}", subject.count(rows))

        def work(x: Tensor, y: Tensor, _rows: Tensor, part: str = part) -> Tensor:
            nonlocal retried
            right, retried = _judge(subject, part, x, y, settings=settings, version=version, seed=seed)
            return right

        began = time.perf_counter()
        for done, right in subject.each(rows, work):
            ledger.enter(done, right, time.perf_counter() - began, retried)
            began = time.perf_counter()
            advance(len(done))
        ledger.join(world)
        correct &= ledger.correct
        seconds += ledger.seconds
        again += ledger.retried
        took[part] = ledger.seconds
        after[part] = float(correct.double().mean())
    detail = {"version": version, "accuracy_after": after, "seconds": took, "retried_in_fp32": again}
    return Repeat(seed, correct, seconds), detail


def _judge(
    subject: Subject, part: str, x: Tensor, y: Tensor, *, settings: Settings, version: Version, seed: int
) -> tuple[Tensor, int]:
    """Whether each example withstands this part, and how many had to be attacked again in fp32."""
    how: dict[str, Any] = {"eps": settings.eps, "norm": settings.norm, "version": version, "seed": seed}
    found = attack_part(part, subject.fast, x, y, **how)
    right = is_correct(subject.model, found.x_adv, y)
    if subject.fast is subject.model and not allows_tf32(x.device):
        return right, 0
    skipped = ~_seen_right(subject.fast, x, y)
    doubtful = torch.nonzero(right & (found.claimed | skipped))[:, 0]
    if len(doubtful):
        # Half batches: fp32 needs twice the memory that the batch size was chosen for.
        for piece in torch.split(doubtful, max(1, subject.batch // 2)):
            with exact(x.device):
                again = attack_part(part, subject.model, x[piece], y[piece], **how)
            right[piece] = is_correct(subject.model, again.x_adv, y[piece])
    return right, len(doubtful)


@torch.no_grad()
def _seen_right(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Whether the rounded model is correct, as pyautoattack sees it: it skips the other examples."""
    return model(x).argmax(dim=1) == y
