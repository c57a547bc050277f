"""Theorem 1 of the paper, checked on a data set: adversarial risk <= friendly bound <= conventional bound?

    friendly      E l(f(X), Y) + E l*(f(X'), Y),   l* = min l + rho over the wrong points of the ball, where there are
                                                   any, else max l over the ball
    conventional  E l(f(X), Y) + E max l(f(X'), Y)

The surrogate l is the cross-entropy in bits, -log2 p_y. It bounds 0/1 from above: it is not negative, and where the
model is wrong some other class is at least as likely, so p_y <= 1/2 and l >= 1. rho is in bits too.

No search finds a true minimum or maximum. Every number comes from points that were found: the image, PGD-100 on the
cross-entropy, PGD-30 on the margin, the friendliest search, and AutoAttack on what still stands; wrong points are
then pulled towards the image as far as they stay wrong. So the risk and max l are estimates from below and min l one
from above. The first inequality holds for found points by the surrogate alone; the second is what the data decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparring.attacks import friendliest_pgd
from sparring.attacks.autoattack import Version, attack_part, is_stochastic, parts
from sparring.attacks.boundary import bisect
from sparring.attacks.checks import Model, check_radius
from sparring.attacks.eval_mode import eval_mode
from sparring.attacks.losses import Loss, cross_entropy
from sparring.errors import UserError, unknown
from sparring.evaluation.gradient_model import frozen
from sparring.evaluation.starts import Starts, pgd_from
from sparring.evaluation.subject import Subject, prepare
from sparring.evaluation.verdicts import exact
from sparring.seeds import check_seed, generator

SURROGATE = "cross-entropy in bits, -log2 p_y: never negative, and at least 1 where the model is wrong (p_y <= 1/2)"
Strongest = Literal["autoattack", "pgd"]
_WRONG = 1e-4  # nats: the margin at which a search calls a point wrong, above rounding
_HALVINGS = 10
_BOOTSTRAP = 6  # what the draws are for
_CHUNK = 20  # resamples at once


@dataclass(frozen=True)
class Estimate:
    """A mean over the images, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bound:
    """The terms of the theorem, and by how much its two inequalities hold."""

    n: int
    eps: float
    rho: float
    strongest: Strongest
    seed: int
    resamples: int
    natural: Estimate  # E l(f(X), Y)
    friendly_term: Estimate  # E l*(f(X'), Y)
    worst_term: Estimate  # E max l(f(X'), Y)
    risk: Estimate  # P(some point of the ball is wrong)
    friendly: Estimate
    conventional: Estimate
    above_risk: Estimate  # friendly - risk
    tighter: Estimate  # conventional - friendly

    def verdicts(self) -> dict[str, str]:
        """Each inequality: holds, does not hold, or undecided by so many images."""
        return {
            "risk <= friendly bound": _verdict(self.above_risk, self.n),
            "friendly bound <= conventional bound": _verdict(self.tighter, self.n),
        }

    @property
    def largest_rho(self) -> float | None:
        """The rho at which both bounds are equal on these images; None where no point is wrong and rho plays no part.

        rho enters the friendly term once for every image with a wrong point, so the bound grows by rho times the risk.
        """
        return self.rho + self.tighter.value / self.risk.value if self.risk.value else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        more = {"largest_rho": self.largest_rho, "surrogate": SURROGATE, "verdicts": self.verdicts()}
        return {**asdict(self), **more}


def _verdict(difference: Estimate, n: int) -> str:
    if difference.low >= 0:
        return "holds"
    return "does not hold" if difference.high < 0 else f"undecided by {n} images"


@dataclass(frozen=True)
class Extremes:
    """What was found in the ball of each image. Losses in bits, float64, on the CPU."""

    natural: Tensor  # l at the image
    wrong: Tensor  # bool: some point is wrong, the image included
    least: Tensor  # the least l of a wrong point; infinite where there is none
    most: Tensor  # the largest l of any point


Watch = Callable[[str, float, int], None]


def bits(logits: Tensor, y: Tensor) -> Tensor:
    """-log2 p_y, in float64; infinite for logits that are not numbers."""
    return cross_entropy(logits.double(), y).nan_to_num(nan=math.inf, posinf=math.inf) / math.log(2)


def friendly_loss(found: Extremes, rho: float) -> Tensor:
    """l*: min l + rho where some point is wrong, else max l."""
    return torch.where(found.wrong, found.least + rho, found.most)


def estimate(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    rho: float = 0.1,
    strongest: Strongest = "autoattack",
    limit: int | None = None,
    seed: int = 0,
    resamples: int = 1000,
    batch_size: int | None = None,
    watch: Watch = lambda what, done, n: None,
) -> Bound:
    """The theorem's terms on these images.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode, left as it was found.
        x: images, float in [0, 1] or uint8.
        rho: the theorem's small constant, in bits, at least 0.
        strongest: "autoattack", or "pgd" for a quick look.
        limit: the first so many images.
        resamples: of the bootstrap.
        watch: told (what is being done, images done, images), a batch's parts as shares of its images.
    """
    check_radius("eps", eps)
    if not 0 <= rho < math.inf:
        raise UserError(f"rho must be finite and at least 0 (bits), got {rho!r}. Write for example 0.1.")
    if strongest not in ("autoattack", "pgd"):
        raise unknown("attack", strongest, ("autoattack", "pgd"))
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 image, got {limit}. Leave it out for all of them.")
    check_seed(seed)
    if resamples < 100:
        raise UserError(f"resamples must be at least 100 for a 95 % interval, got {resamples}.")
    x, y = x[:limit], y[:limit]
    with eval_mode(model), frozen(model), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)  # a stochastic model draws from torch's global state
        subject = prepare(model, x, y, precision="fp32", batch_size=batch_size)
        found = extremes(subject, eps=eps, strongest=strongest, seed=seed, watch=watch)
    bad = int((~found.most.isfinite()).sum())
    if bad:
        raise UserError(f"the loss is not finite on {bad} of {len(y)} images: no bound holds there. Check the model.")
    return conclude(found, eps=eps, rho=rho, strongest=strongest, seed=seed, resamples=resamples)


def conclude(found: Extremes, *, eps: float, rho: float, strongest: Strongest, seed: int, resamples: int) -> Bound:
    """The theorem's terms from what was found in each ball."""
    friendly, worst, risk = friendly_loss(found, rho), found.most, found.wrong.double()
    columns = {
        "natural": found.natural,
        "friendly_term": friendly,
        "worst_term": worst,
        "risk": risk,
        "friendly": found.natural + friendly,
        "conventional": found.natural + worst,
        "above_risk": found.natural + friendly - risk,
        "tighter": worst - friendly,
    }
    estimates = bootstrap(columns, resamples=resamples, seed=seed)
    return Bound(len(risk), eps, rho, strongest, seed, resamples, **estimates)


def bootstrap(columns: dict[str, Tensor], *, resamples: int, seed: int) -> dict[str, Estimate]:
    """Means and 95 % percentile intervals; every column sees the same resampled images."""
    values = torch.stack(list(columns.values()))
    n = values.shape[1]
    draws = generator("cpu", seed, _BOOTSTRAP)
    means = []
    for first in range(0, resamples, _CHUNK):
        rows = torch.randint(0, n, (min(_CHUNK, resamples - first), n), generator=draws)
        means.append(values[:, rows].mean(dim=2))
    ends = torch.quantile(torch.cat(means, dim=1), torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    return {
        name: Estimate(values[i].mean().item(), ends[0, i].item(), ends[1, i].item()) for i, name in enumerate(columns)
    }


def extremes(subject: Subject, *, eps: float, strongest: Strongest, seed: int, watch: Watch) -> Extremes:
    """The least and the largest loss found in every ball."""
    climbs: list[tuple[Loss, int, Starts]] = [
        ("ce", 100, Starts("uniform", eps=eps, seed=seed, purpose="bound ce")),
        ("cw", 30, Starts("uniform", eps=eps, seed=seed, purpose="bound cw")),
    ]

    n = len(subject.x)
    probe, _ = subject.take(torch.arange(min(n, 64, subject.batch)))
    version: Version = "rand" if is_stochastic(subject.model, probe) else "standard"

    def work(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        def tell(what: str, share: float) -> None:
            watch(what, int(rows[0]) + share * len(rows), n)

        seen = _Seen(subject.model, x, y)
        for place, (loss, steps, starts) in enumerate(climbs):
            tell(f"{str(loss).upper()}, {steps} steps", 0.1 * place)
            begin = starts(x, rows)
            seen.look(pgd_from(subject.model, x, y, start=begin, eps=eps, step_size=eps / 10, steps=steps, loss=loss))
        tell("friendliest", 0.2)
        seen.look(_friendliest(subject.model, x, y, eps))
        if strongest == "autoattack":
            _autoattack(subject, seen, x, y, eps=eps, version=version, seed=seed, tell=tell)
        tell("friendliest, again", 0.9)
        seen.pull()
        return torch.stack([seen.natural, seen.wrong.double(), seen.least, seen.most], dim=1).cpu()

    found = []
    for rows, columns in subject.each(torch.arange(n), work):
        found.append(columns)
        watch("images", int(rows[-1]) + 1, n)
    natural, wrong, least, most = torch.cat(found).unbind(dim=1)
    return Extremes(natural, wrong > 0, least, most)


def _friendliest(model: Model, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """From the image itself: up to the first wrong point, or, where the image is wrong, down to the last."""
    with exact(x.device):  # TF32 is coarser than the margin
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
    tell: Callable[[str, float], None],
) -> None:
    """Every part of AutoAttack on what still stands, in exact fp32: it skips what rounding gets wrong."""
    names = parts(version, classes=subject.classes)
    for place, part in enumerate(names):
        tell(f"AutoAttack {part}", 0.3 + 0.6 * place / len(names))
        rows = torch.nonzero(~seen.wrong)[:, 0]
        if len(rows) == 0:
            return
        with exact(x.device):
            claim = attack_part(part, subject.model, x[rows], y[rows], eps=eps, version=version, seed=seed)
        seen.look(claim.x_adv, rows)


class _Seen:
    """The points of one batch, as they come."""

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        self.model, self.x, self.y = model, x, y
        self.point = x.clone()  # the wrong point of least loss
        self.wrong = torch.zeros_like(y, dtype=torch.bool)
        self.least = torch.full_like(y, torch.inf, dtype=torch.float64)
        self.most = torch.zeros_like(self.least)
        self.natural = self.look(x)
        self.right = ~self.wrong

    @torch.no_grad()
    def look(self, points: Tensor, rows: Tensor | None = None) -> Tensor:
        """Enter a point of every example, or of `rows`; its losses."""
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
        """Wrong points towards their right images, as far as they stay wrong."""
        rows = torch.nonzero(self.wrong & self.right & self.least.isfinite())[:, 0]
        ends = self.point[rows], self.x[rows]
        with exact(self.x.device):
            for middle, _, _ in bisect(self.model, *ends, self.y[rows], rho=_WRONG, by="loss", halvings=_HALVINGS):
                self.look(middle, rows)
