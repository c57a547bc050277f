"""Theorem 1 of the paper, checked on a data set: adversarial risk <= friendly bound <= conventional bound?

    friendly      E l(f(X), Y) + E l*(f(X'), Y),   l* = min l + rho over the misclassified points of the ball if there
                                                   are any, otherwise max l over the ball
    conventional  E l(f(X), Y) + E max l(f(X'), Y)

The surrogate l is the cross-entropy in bits, -log2 p_y. It is an upper bound of the 0/1 loss: it is not negative, and
where the model is wrong some other class is at least as likely, so p_y <= 1/2 and l >= 1. rho is in bits too.

All terms are estimates from points that were found (`paper.extremes`). For such points the surrogate alone guarantees
the first inequality; the second one depends on the data.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparring.attacks.checks import Model
from sparring.attacks.eval_mode import eval_mode, frozen
from sparring.attacks.threat import check_radius
from sparring.errors import UserError, unknown
from sparring.evaluation.subject import prepare
from sparring.paper.extremes import Extremes, ProgressCallback, Strongest, extremes
from sparring.seeds import check_seed, generator

SURROGATE = "cross-entropy in bits, -log2 p_y: never negative, and at least 1 where the model is wrong (p_y <= 1/2)"
_BOOTSTRAP = 6  # key of the bootstrap's random stream
_CHUNK = 20  # resamples at once


@dataclass(frozen=True)
class Estimate:
    """A mean over the images, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bound:
    """The terms of the theorem, and the margins of its two inequalities."""

    n: int
    eps: float
    rho: float
    strongest: Strongest
    seed: int
    resamples: int
    natural: Estimate  # E l(f(X), Y)
    friendly_term: Estimate  # E l*(f(X'), Y)
    worst_term: Estimate  # E max l(f(X'), Y)
    risk: Estimate  # P(some point of the ball is misclassified)
    friendly: Estimate
    conventional: Estimate
    above_risk: Estimate  # friendly - risk
    tighter: Estimate  # conventional - friendly

    def findings(self) -> dict[str, str]:
        """For each inequality: 'holds', 'does not hold', or 'undecided with n images'."""
        return {
            "risk <= friendly bound": _finding(self.above_risk, self.n),
            "friendly bound <= conventional bound": _finding(self.tighter, self.n),
        }

    @property
    def largest_rho(self) -> float | None:
        """The rho at which both bounds are equal on these images; None if no point is misclassified, so rho is unused.

        rho enters the friendly term once for every image with a misclassified point: the bound grows by rho times risk.
        """
        return self.rho + self.tighter.value / self.risk.value if self.risk.value else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        more = {"largest_rho": self.largest_rho, "surrogate": SURROGATE, "verdicts": self.findings()}
        return {**asdict(self), **more}


def _finding(difference: Estimate, n: int) -> str:
    if difference.low >= 0:
        return "holds"
    return "does not hold" if difference.high < 0 else f"undecided with {n} images"


def friendly_loss(found: Extremes, rho: float) -> Tensor:
    """l*: min l + rho where some point is misclassified, otherwise max l."""
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
    progress: ProgressCallback = lambda what, done, n: None,
) -> Bound:
    """The theorem's terms on these images.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode and left unchanged.
        x: images, float in [0, 1] or uint8.
        rho: the theorem's small constant, in bits, at least 0.
        strongest: "autoattack", or "pgd" for a quick estimate.
        limit: use only the first `limit` images.
        resamples: number of bootstrap resamples.
        progress: called with (current attack, images done, images); the attacks on a batch count as fractions of it.
    """
    check_radius("eps", eps)
    if not 0 <= rho < math.inf:
        raise UserError(f"rho must be finite and at least 0 (bits), got {rho!r}. Write for example 0.1.")
    if strongest not in ("autoattack", "pgd"):
        raise unknown("attack", strongest, ("autoattack", "pgd"))
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 image, got {limit}. Leave it out to use all images.")
    check_seed(seed)
    if resamples < 100:
        raise UserError(f"resamples must be at least 100 for a 95 % interval, got {resamples}. Write for example 1000.")
    x, y = x[:limit], y[:limit]
    with eval_mode(model), frozen(model), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)  # a stochastic model draws from torch's global generator
        subject = prepare(model, x, y, precision="fp32", batch_size=batch_size)
        found = extremes(subject, eps=eps, strongest=strongest, seed=seed, progress=progress)
    bad = int((~found.most.isfinite()).sum())
    if bad:
        raise UserError(
            f"the loss is not finite on {bad} of {len(y)} images, so no bound exists. Check the model's outputs."
        )
    return conclude(found, eps=eps, rho=rho, strongest=strongest, seed=seed, resamples=resamples)


def conclude(found: Extremes, *, eps: float, rho: float, strongest: Strongest, seed: int, resamples: int) -> Bound:
    """The theorem's terms from the extremes of every ball."""
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
    """Means and 95 % percentile intervals; every column uses the same resampled images."""
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
