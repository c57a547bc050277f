"""Doubts about a robustness number: signs that an attack failed for a reason other than the model's robustness.

`doubts` runs the model on up to `limit` images and passes what it measured to the checks of `checks`. The page of a
doubt, in pages/, says what causes it and what to do.

On one CPU thread, 256 images of 8x8 and a network of 48,058 parameters (fat-digits at eps 0.3) take 2.4 s of CPU time,
and 1.1 s where the verdicts of PGD-20, PGD-100 and C&W are known; of these the smoothed gradient takes 0.2 s. Must not
know protocols or files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import Model, NotFinite, call, check_batch, check_logits
from sparring.attacks.eval_mode import eval_mode
from sparring.attacks.failures import quoted
from sparring.attacks.threat import Norm, check_norm, check_radius
from sparring.errors import UserError
from sparring.evaluation.sanity import checks, probes
from sparring.evaluation.sanity.explain import command
from sparring.seeds import check_seed

PGD_STEPS, MANY_STEPS, CW_STEPS = 20, 100, 30
ALONE = 4  # images that are also judged one by one
# Restarts of PGD on images that the smoothed gradient or the blind search broke. With two losses 5 take 200 gradients,
# three times as many as the smoothed gradient is averaged from. Images that the search broke get 5 more: twice as many
# gradients as it had queries. Of fat-digits at eps 0.3 it keeps 1 to 8 of 256 images after 5, 1 to 5 after 10 (12
# seeds), and 8 raise a doubt.
RESTARTS, RESTART_STEPS = 5, checks.SQUARE_QUERIES // 10


class _How(TypedDict):
    """The numbers of a probe by PGD."""

    eps: float
    norm: Norm
    step_size: float
    steps: int
    generator: torch.Generator


@dataclass(frozen=True)
class Doubt:
    """A reason not to trust a robustness number."""

    name: str
    why: str  # one sentence: why it matters
    evidence: str  # what was measured
    page: str  # the command that prints what causes it and what to do


def doubts(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    norm: Norm = "linf",
    correct: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    limit: int = 256,
) -> list[Doubt]:
    """Find the reasons to doubt attacks on this model: none for an honest one. The model is left as it was found.

    Args:
        model: maps pixels in [0, 1] to logits; pass it as it will be used, eval mode included.
        x: images in [0, 1].
        y: int64 labels.
        eps: the radius whose number is in question.
        norm: in which it is measured.
        correct: verdicts already known, by attack ("fgsm", "pgd20", "pgd100", "cw30", ...): bool, one per image of x.
        seed: of starts, noise and the blind search.
        limit: the largest number of images to measure on.
    """
    check_norm(norm)
    check_radius("eps", eps, norm)
    check_batch(x, y)
    known = {name: verdict.to(x.device).bool() for name, verdict in (correct or {}).items()}
    for name, verdict in known.items():
        if verdict.shape != y.shape:
            raise UserError(f"correct[{name!r}] must hold one verdict per image, {len(y)}, got {tuple(verdict.shape)}.")
    if len(x) == 0 or limit < 1:
        return []
    check_seed(seed)
    found = {"train-mode": checks.train_mode(model)}
    rows = torch.linspace(0, len(x) - 1, min(limit, len(x)), device=x.device).round().long()  # images may be sorted
    devices = [x.device] if x.device.type == "cuda" else []
    # A random model draws from the global state: here from a fork of it, which is discarded.
    with torch.random.fork_rng(devices=devices), eval_mode(model):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        try:
            found |= _measure(model, x[rows], y[rows], eps=eps, norm=norm, known=known, rows=rows, seed=seed)
        except NotFinite as error:  # finite at the images, and not where an attack begins
            found["logits-not-finite"] = f"Inside the ball {error}"
    return [
        Doubt(name, why, evidence, command(name))
        for name, why in checks.WHY.items()
        if (evidence := found.get(name)) is not None
    ]


def _measure(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    norm: Norm,
    known: Mapping[str, Tensor],
    rows: Tensor,
    seed: int,
) -> dict[str, str | None]:
    """Run the model: forward passes, then gradients, then attacks. `known` covers all images, x those at `rows`."""
    generator = torch.Generator(device=x.device)
    generator.manual_seed(seed)
    with torch.no_grad():
        logits, again = call(model, x), call(model, x)
        check_logits(logits, x, y)
        if broken := checks.logits_not_finite(logits):  # nothing else can be measured
            return {"logits-not-finite": broken}
        found: dict[str, str | None] = {
            "randomness-at-inference": checks.randomness(logits, again),
            "probabilities-not-logits": checks.probabilities(logits),
        }
        if found["randomness-at-inference"] is None and len(x) > 1:
            try:
                found["batch-dependence"] = _other_batches(model, x, logits)
            except UserError as error:  # batches shrink in the attacks below, too
                said = quoted(error.__cause__ or error)
                return {**found, "batch-dependence": f"In a smaller batch it raises {said}; no other check was run."}
    clean = logits.argmax(dim=1) == y
    gradients = probes.gradients(model, x, y)
    if isinstance(gradients, str):
        return {**found, "non-differentiable": gradients}
    of_ce, of_margin = gradients
    draws = torch.Generator(device=x.device).manual_seed(seed)  # of its own: the other checks have the same as without
    nearby = ball.random_start(x, eps=eps, start="uniform", generator=draws, norm=norm)
    around = probes.gradients(model, nearby, y)
    sizes = gradients if isinstance(around, str) else (*gradients, *around)
    found["gradients-not-finite"] = checks.gradients_not_finite(*sizes)
    found["zero-gradients"] = checks.zero_gradients(of_ce[clean], of_margin[clean])
    found["vanishing-gradients"] = checks.vanishing_gradients(of_ce[clean], of_margin[clean])

    known_pgd = {steps: known[name] for name in known if (steps := _steps(name))}
    known_cw = next((known[name] for name in known if re.fullmatch("cw[0-9]*", name)), None)
    enough = sum(steps > 1 for steps in known_pgd) > 1
    many = PGD_STEPS if enough else MANY_STEPS
    ascent = probes.ascent(model, x, y, eps=eps, norm=norm, steps=many, check_after=PGD_STEPS)
    found["loss-does-not-grow"] = checks.loss_does_not_grow(ascent.first[clean], ascent.last[clean])
    weaker = checks.more_steps_weaker(known_pgd) or checks.more_steps_weaker(ascent.correct)
    if weaker:
        # Large steps of a fixed size overshoot on honest models too: if small ones break as many images, the gradient
        # was meaningful after all.
        verdicts = [*(verdict[rows] for verdict in known_pgd.values()), *ascent.correct.values()]
        lowest = min(verdicts, key=lambda verdict: int(verdict.sum()))
        settled = probes.settled(model, x, y, eps=eps, norm=norm, steps=MANY_STEPS)
        weaker = weaker if checks.excess(settled, lowest) > checks.STEPS_GAP else None
    found["more-steps-weaker"] = weaker
    here = ascent.correct[max(ascent.correct)]
    how: _How = {"eps": eps, "norm": norm, "step_size": eps / 4, "steps": CW_STEPS, "generator": generator}
    if known_cw is None:
        cw = probes.standing(model, x, y, loss="cw", **how)
        found["cw-far-from-ce"] = checks.cw_far_from_ce(here, cw)
    else:
        cw = known_cw[rows]
        ce_and_cw = (known_pgd[max(known_pgd)], known_cw) if known_pgd else (here, cw)
        found["cw-far-from-ce"] = checks.cw_far_from_ce(*ce_and_cw)

    everywhere = clean.clone()
    # In L2 the same boxes lie in balls as many times larger as a cube's diagonal is longer than its edge.
    radii = [radius * (math.sqrt(x[0].numel()) if norm == "l2" else 1.0) for radius in checks.LARGE_EPS]
    for radius in radii:  # an image counts only where it withstands every radius
        left = torch.nonzero(everywhere)[:, 0]
        how |= {"eps": radius, "step_size": radius / 10, "steps": checks.LARGE_STEPS}
        everywhere[left] = probes.standing(model, x[left], y[left], **how)
    found["no-collapse-at-large-eps"] = checks.no_collapse(everywhere, y, radii)

    attacked = here.clone()
    for verdict in known_pgd.values():
        attacked &= verdict[rows]
    with torch.no_grad():
        drawn = ball.draw_in_ball(x, generator, norm)
        noises = (drawn, ball.steepest(drawn, norm))  # inside the ball, and in its corners or on its surface
        noisy = [model(ball.project(x + eps * noise, x, eps, norm)).argmax(dim=1) == y for noise in noises]
    found["noise-hurts-as-much"] = checks.noise_hurts_as_much(clean, min(noisy, key=lambda v: int(v.sum())), attacked)
    withstood = attacked & cw & clean
    for verdict in known.values():  # AutoAttack's too
        withstood &= verdict[rows]
    standing = torch.nonzero(withstood)[:, 0]
    search = {"eps": eps, "queries": checks.SQUARE_QUERIES, "generator": generator, "norm": norm}
    blind = probes.square(model, x[standing], y[standing], **search)  # type: ignore[arg-type]
    smooth = {"steps": checks.SMOOTH_STEPS, "samples": checks.SMOOTH_SAMPLES, "generator": generator, "norm": norm}
    level = probes.smoothed(model, x[standing], y[standing], eps=eps, **smooth)  # type: ignore[arg-type]
    wrong = standing[~(blind & level)]
    restarts: dict[str, Any] = {"eps": eps, "norm": norm, "generator": generator}
    missed = _missed_by_restarts(model, x, y, wrong, **restarts)
    smoothed = int(torch.isin(missed, standing[~level]).sum())
    found["smoothing-beats-gradient"] = checks.smoothing_beats_gradient(smoothed, len(standing), len(x))
    searched = _missed_by_restarts(model, x, y, missed[torch.isin(missed, standing[~blind])], **restarts)
    found["square-beats-white-box"] = checks.square_beats_white_box(len(searched), len(standing), len(x))
    return found


def _other_batches(model: Model, x: Tensor, logits: Tensor) -> str | None:
    """Whether images have other logits in half of the batch, or alone."""
    half, few = len(x) // 2, torch.linspace(0, len(x) - 1, min(ALONE, len(x)), device=x.device).round().long()
    by_half = checks.batch_dependence(logits[:half], call(model, x[:half]), "In half the batch")
    alone = torch.cat([call(model, x[row : row + 1]) for row in few.tolist()])
    return by_half or checks.batch_dependence(logits[few], alone, "Alone")


def _missed_by_restarts(
    model: Model, x: Tensor, y: Tensor, rows: Tensor, *, eps: float, norm: Norm, generator: torch.Generator
) -> Tensor:
    """Those of `rows` that PGD from random starts does not break either.

    The search tries many points, and so does a smoothed gradient; PGD started at one. At a large radius an honest loss
    has local maxima, and a single start ends in one of them: the gradient misleads only if PGD fails with more
    gradients than the other attack had gradients or queries.
    """
    losses: tuple[Literal["ce", "cw"], ...] = ("ce", "cw")
    for restart in range(RESTARTS):
        for loss in losses:
            stands = probes.standing(
                model,
                x[rows],
                y[rows],
                eps=eps,
                norm=norm,
                step_size=eps / (10 if restart % 2 else 4),  # an honest maximum may need either
                steps=RESTART_STEPS,
                loss=loss,
                generator=generator,
            )
            rows = rows[stands]
    return rows


def _steps(name: str) -> int | None:
    """The steps of a PGD attack by its name: fgsm, pgd20, pgd100; None for any other attack."""
    if name == "fgsm":
        return 1
    found = re.fullmatch("pgd([0-9]+)", name)
    return int(found[1]) if found else None
