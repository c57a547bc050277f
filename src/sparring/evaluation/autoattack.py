"""AutoAttack, part by part and batch by batch, on the examples that are not broken yet.

Its accuracy is independent of other attacks: every example that is correct without attack is attacked, whatever other
attacks of the same call found. A success counts only if the caller's model, in exact fp32, is wrong there. With
gradients in bf16 or TF32 two kinds of example would escape: one broken by rounding only, and one that the rounded model
misclassifies without attack, which the pyautoattack package skips. A point of the first kind counts where it is
misclassified at the edge of the ball, along its own line. All others are attacked again by the same part in exact fp32,
so rounding never increases the accuracy: those of all batches together, because a part takes up to 5,000 steps however
few they are. The ledger names them, so a continued run begins with them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.autoattack import Version, attack_part, is_stochastic, parts
from sparring.attacks.checks import Model
from sparring.errors import UserError
from sparring.evaluation.cache import Ledger
from sparring.evaluation.gradient_model import replayed
from sparring.evaluation.progress import Advance, BySteps, Task
from sparring.evaluation.protocols import Settings
from sparring.evaluation.result import Repeat
from sparring.evaluation.subject import Subject
from sparring.evaluation.verdicts import allows_tf32, exact, is_correct
from sparring.training.distributed import ALONE, World

_log = logging.getLogger(__name__)


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
    if version == "standard" and probe.ndim != 4:  # said before hours of other parts
        shape = tuple(subject.x.shape)
        raise UserError(f"AutoAttack's Square needs images of shape (n, channels, height, width), got {shape}.")
    correct = natural.clone()
    after: dict[str, float] = {}
    took: dict[str, float] = {}
    again, seconds = 0, 0.0
    for part in parts(version, classes=subject.classes):
        ledger = ledger_of(part)
        rows = torch.nonzero(correct & ~ledger.judged)[:, 0]
        advance = task(f"AutoAttack {part}", subject.count(rows))
        how: dict[str, Any] = {"eps": settings.eps, "norm": settings.norm, "version": version, "seed": seed}
        _attack(subject, part, rows, ledger, advance, world, **how)
        ledger.join(world)
        correct &= ledger.correct
        seconds += ledger.seconds
        again += ledger.retried
        took[part] = ledger.seconds
        after[part] = float(correct.double().mean())
    detail = {"version": version, "accuracy_after": after, "seconds": took, "retried_in_fp32": again}
    return Repeat(seed, correct, seconds), detail


def _attack(
    subject: Subject, part: str, rows: Tensor, ledger: Ledger, advance: Advance, world: World, **how: Any
) -> None:
    """Attack these examples by one part, and enter their verdicts as they come."""

    by_call = BySteps(advance, 1)

    def moving(x: Tensor) -> dict[str, Any]:
        return how | {"each_call": lambda share: by_call(len(x) * share)}

    def first(x: Tensor, y: Tensor, _rows: Tensor) -> Tensor:
        return _judge(subject, subject.steady if part == "square" else subject.fast, part, x, y, **moving(x))

    def again(x: Tensor, y: Tensor, _rows: Tensor) -> Tensor:
        with exact(x.device):
            model = replayed(subject.model, x) if how["version"] == "standard" else subject.model
            found = attack_part(part, model, x, y, **moving(x))
        return is_correct(subject.model, found.x_adv, y)

    began = time.perf_counter()
    # Those that an interrupted run has found doubtful are not attacked so again.
    for done, found in subject.each(rows[~ledger.doubtful[rows]], first):
        right, doubted = found.cpu()
        ledger.doubtful[done[doubted]] = True
        ledger.enter(done[~doubted], right[~doubted], time.perf_counter() - began)
        by_call.finish(int((~doubted).sum()))
        began = time.perf_counter()
    # Those of all processes, so that batches are what they are for one.
    doubtful = world.total(ledger.doubtful.long()) > 0
    # Half batches: fp32 needs twice the memory.
    for done, right in subject.each(rows[doubtful[rows]], again, parted=2):
        took = time.perf_counter() - began
        _log.debug("%s again in fp32: %d images, %.1f s", part, len(done), took)
        ledger.enter(done, right, took, len(done))
        by_call.finish(len(done))
        began = time.perf_counter()


def _judge(subject: Subject, model: Model, part: str, x: Tensor, y: Tensor, **how: Any) -> Tensor:
    """Two rows: whether each example withstands this part on that model, and whether rounding leaves it in doubt."""
    found = attack_part(part, model, x, y, **how)
    right = is_correct(subject.model, found.x_adv, y)
    if model is subject.model and not allows_tf32(x.device):
        return torch.stack([right, torch.zeros_like(right)])
    doubted = torch.nonzero(right & found.claimed)[:, 0]
    if len(doubted):
        # FAB ends beside the boundary of the rounded model. Farther out, the point is beyond the model's own one.
        edge = ball.outward(found.x_adv[doubted], x[doubted], how["eps"], how["norm"])
        right[doubted] = is_correct(subject.model, edge, y[doubted])
    skipped = ~_seen_right(model, x, y)
    return torch.stack([right, right & (found.claimed | skipped)])


@torch.no_grad()
def _seen_right(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Whether the rounded model is correct, as pyautoattack sees it: it skips the other examples."""
    return model(x).argmax(dim=1) == y
