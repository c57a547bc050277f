"""The least and the largest loss found in the ball around each image, for Theorem 1 (`paper.bound`).

No search finds a true minimum or maximum. Every number is the loss of a point that was found: the image, PGD-100 on the
cross-entropy, PGD-30 on the margin, the friendliest search, and AutoAttack on the images that are still classified
correctly. Misclassified points are then moved towards their image as far as they stay misclassified. So the risk and
the maximum are estimates from below, and the minimum is one from above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparring.attacks import friendliest_pgd
from sparring.attacks.autoattack import Version, attack_part, is_stochastic, parts
from sparring.attacks.boundary import bisect
from sparring.attacks.checks import Model
from sparring.attacks.losses import Loss, cross_entropy
from sparring.evaluation.starts import Starts, pgd_from
from sparring.evaluation.subject import Subject
from sparring.evaluation.verdicts import exact

Strongest = Literal["autoattack", "pgd"]
ProgressCallback = Callable[[str, float, int], None]  # (current attack, images done, images)
_WRONG = 1e-4  # nats: the margin at which a search counts a point as misclassified, above rounding
_HALVINGS = 10


@dataclass(frozen=True)
class Extremes:
    """What was found in the ball of each image. Losses in bits, float64, on the CPU."""

    natural: Tensor  # l at the image
    wrong: Tensor  # bool: some point is misclassified, the image included
    least: Tensor  # the least l of a misclassified point; infinite if there is none
    most: Tensor  # the largest l of any point


def bits(logits: Tensor, y: Tensor) -> Tensor:
    """-log2 p_y, in float64; infinite for logits that are NaN."""
    return cross_entropy(logits.double(), y).nan_to_num(nan=math.inf, posinf=math.inf) / math.log(2)


def extremes(subject: Subject, *, eps: float, strongest: Strongest, seed: int, progress: ProgressCallback) -> Extremes:
    """The least and the largest loss found in the ball of every image."""
    attacks: list[tuple[Loss, int, Starts]] = [
        ("ce", 100, Starts("uniform", eps=eps, seed=seed, purpose="bound ce")),
        ("cw", 30, Starts("uniform", eps=eps, seed=seed, purpose="bound cw")),
    ]

    n = len(subject.x)
    probe, _ = subject.take(torch.arange(min(n, 64, subject.batch)))
    version: Version = "rand" if is_stochastic(subject.model, probe) else "standard"

    def work(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        def report(what: str, fraction: float) -> None:
            progress(what, int(rows[0]) + fraction * len(rows), n)

        seen = _Seen(subject.model, x, y)
        for place, (loss, steps, starts) in enumerate(attacks):
            report(f"{str(loss).upper()}, {steps} steps", 0.1 * place)
            begin = starts(x, rows)
            seen.add(pgd_from(subject.model, x, y, start=begin, eps=eps, step_size=eps / 10, steps=steps, loss=loss))
        report("friendliest", 0.2)
        seen.add(_friendliest(subject.model, x, y, eps))
        if strongest == "autoattack":
            _autoattack(subject, seen, x, y, eps=eps, version=version, seed=seed, report=report)
        report("friendliest, again", 0.9)
        seen.pull()
        return torch.stack([seen.natural, seen.wrong.double(), seen.least, seen.most], dim=1).cpu()

    found = []
    for rows, columns in subject.each(torch.arange(n), work):
        found.append(columns)
        progress("images", int(rows[-1]) + 1, n)
    natural, wrong, least, most = torch.cat(found).unbind(dim=1)
    return Extremes(natural, wrong > 0, least, most)


def _friendliest(model: Model, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Points near the boundary, searched from the image: upwards to the first wrong one, or downwards to the last."""
    with exact(x.device):  # TF32 rounds more coarsely than this margin
        return friendliest_pgd(
            model, x, y, eps=eps, step_size=eps / 10, steps=20, rho=_WRONG, halvings=_HALVINGS, start=None
        ).x_adv


def _autoattack(
    subject: Subject,
    seen: _Seen,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    version: Version,
    seed: int,
    report: Callable[[str, float], None],
) -> None:
    """Run every part of AutoAttack on the images that are still right, in exact fp32 so that it skips none of them."""
    names = parts(version, classes=subject.classes)
    for place, part in enumerate(names):
        report(f"AutoAttack {part}", 0.3 + 0.6 * place / len(names))
        rows = torch.nonzero(~seen.wrong)[:, 0]
        if len(rows) == 0:
            return
        with exact(x.device):
            claim = attack_part(part, subject.model, x[rows], y[rows], eps=eps, version=version, seed=seed)
        seen.add(claim.x_adv, rows)


class _Seen:
    """The extremes of one batch over all points added to it."""

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        self.model, self.x, self.y = model, x, y
        self.point = x.clone()  # the misclassified point of least loss
        self.wrong = torch.zeros_like(y, dtype=torch.bool)
        self.least = torch.full_like(y, torch.inf, dtype=torch.float64)
        self.most = torch.zeros_like(self.least)
        self.natural = self.add(x)
        self.right = ~self.wrong

    @torch.no_grad()
    def add(self, points: Tensor, rows: Tensor | None = None) -> Tensor:
        """Add one point for every example, or for `rows`; return their losses."""
        rows = torch.arange(len(self.y), device=self.y.device) if rows is None else rows
        with exact(points.device):
            logits = self.model(points)
        loss = bits(logits, self.y[rows])
        wrong = (logits.argmax(dim=1) != self.y[rows]) | logits.isnan().any(dim=1)
        better = wrong & (loss < self.least[rows])
        self.wrong[rows] |= wrong
        self.most[rows] = torch.maximum(self.most[rows], loss)
        self.least[rows[better]] = loss[better]
        self.point[rows[better]] = points[better]
        return loss

    def pull(self) -> None:
        """Move misclassified points towards correctly classified images, as far as they stay misclassified."""
        rows = torch.nonzero(self.wrong & self.right & self.least.isfinite())[:, 0]
        ends = self.point[rows], self.x[rows]
        with exact(self.x.device):
            for middle, _, _ in bisect(self.model, *ends, self.y[rows], rho=_WRONG, by="loss", halvings=_HALVINGS):
                self.add(middle, rows)
