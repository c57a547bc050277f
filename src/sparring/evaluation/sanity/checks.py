"""Doubts about a robustness number: signs that an attack failed for a reason other than the model's strength.

After the checklists of Athalye et al., "Obfuscated gradients give a false sense of security" (Sec. 3.1), and of
Carlini et al., "On evaluating adversarial robustness", and the flags AutoAttack raises. Each check is a pure function
of measurements that returns its evidence or None; `doubts` measures, on up to `limit` images, and collects. A
difference counts only where it exceeds the noise of so many images. A page per finding stands in pages/.

On one CPU thread 256 images of 8x8 and a network of 54,346 parameters take 3.4 s, and 1.5 s where the verdicts of
PGD-20, PGD-100 and C&W are known. Must not know protocols or files.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparring.attacks import ball
from sparring.attacks.checks import Model, check_batch, check_logits, check_radius
from sparring.attacks.eval_mode import eval_mode
from sparring.errors import UserError
from sparring.evaluation.sanity import probes
from sparring.seeds import check_seed

WHY = {
    "train-mode": "batch-norm and dropout in train mode make another function of every batch than the one deployed.",
    "randomness-at-inference": "an attack on one draw of a random model says little about the next draw.",
    "probabilities-not-logits": "a softmax inside the model flattens the loss, and attacks made for logits go blind.",
    "batch-dependence": "a prediction that depends on the other images in the batch is not a property of the image.",
    "non-differentiable": "no gradient reaches the image, so a gradient attack cannot even begin.",
    "zero-gradients": "where the gradient is zero PGD stands still, and the image counts as robust without a fight.",
    "vanishing-gradients": "a saturated loss leaves a gradient of rounding errors, and PGD follows those.",
    "loss-does-not-grow": "an attack whose loss does not rise is not attacking: the gradient points nowhere useful.",
    "more-steps-weaker": "more steps can only help an attack that follows a meaningful gradient.",
    "cw-far-from-ce": "two losses with one goal disagree, so at least one is blinded; at most the lower number holds.",
    "no-collapse-at-large-eps": "so far out any image can become grey: a model that still stands was not attacked.",
    "noise-hurts-as-much": "an attack that does no better than random noise has found nothing.",
    "square-beats-white-box": "knowing the gradient should help; if a blind search does better, the gradient misleads.",
}

# Noise. Three standard deviations, one-sided: a check without cause fires in about 1 of 700 evaluations.
Z = 3.0
# Two runs on the same batch are equal bit for bit on a CPU, to about 1e-6 on a GPU; relative to the logits' spread.
SAME_RUN = 1e-4
# Another batch size may choose another kernel, in TF32 or bf16: about 1e-3 to 1e-2.
SAME_BATCH = 0.05
# A row of probabilities sums to 1 within the rounding of half precision.
SUM_TO_ONE = 2e-3
# Share of correctly classified images without a gradient that is tolerated: dead paths and a few sure images exist.
DEAD = 0.05
# CE gradient over margin gradient is the probability of being wrong. Below 1e-12 (a gap of 28 between logits) float32
# has lost the term of the true class long ago (1 - p_y rounds to 0 at 6e-8); honest networks have a gap of 5 to 20.
VANISHED, VANISHED_SHARE = 1e-12, 0.25
# From the first step to the last the loss of nearly every image rises on an honest network; of half, by chance.
GROWS = 0.75
# C&W is 0 to 6 points below CE on peers' ResNet-18 (PGD-AT 1.6, TRADES 3.1, MART 5.7): far is well beyond that.
CW_GAP = 0.10
# PGD-100 against PGD-20: smaller losses than this are of no consequence.
STEPS_GAP = 0.01
# At 0.5 every image can be turned into the same grey one: no classifier can be right on more than one class.
LARGE_EPS, LARGE_STEPS, LARGE_FLOOR = (0.5, 1.0), 40, 0.05
# Noise breaks few images next to an attack; with fewer than this many broken or standing there is nothing to compare.
NOISE_SHARE, NOISE_LEAST = 0.9, 10
# A short blind search breaks next to none of the images that PGD and C&W leave standing on an honest model.
SQUARE_SHARE, SQUARE_QUERIES = 0.01, 200
PGD_STEPS, MANY_STEPS, CW_STEPS = 20, 100, 30


@dataclass(frozen=True)
class Doubt:
    """A reason not to believe a robustness number."""

    name: str
    why: str  # one sentence: why it matters
    evidence: str  # what was measured
    page: str  # what causes it, and what to do


def doubts(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    correct: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    limit: int = 256,
) -> list[Doubt]:
    """The reasons to doubt what attacks on this model say, none for an honest one. The model is left as it was found.

    Args:
        model: maps pixels in [0, 1] to logits; hand it over as it is to be used, eval mode and all.
        eps: the radius whose number is in question.
        correct: verdicts known already, by attack ("fgsm", "pgd20", "pgd100", "cw30", ...): bool, one per image of x.
        seed: of starts, noise and the blind search.
        limit: the most images to measure on.
    """
    check_radius("eps", eps)
    check_batch(x, y)
    known = {name: verdict.to(x.device).bool() for name, verdict in (correct or {}).items()}
    for name, verdict in known.items():
        if verdict.shape != y.shape:
            raise UserError(f"correct[{name!r}] must hold one verdict per image, {len(y)}, got {tuple(verdict.shape)}.")
    if len(x) == 0 or limit < 1:
        return []
    check_seed(seed)
    found = {"train-mode": train_mode(model)}
    rows = torch.linspace(0, len(x) - 1, min(limit, len(x)), device=x.device).round().long()  # images may be sorted
    devices = [x.device] if x.device.type == "cuda" else []
    # A random model draws from the global state: here from a fork of it, which is thrown away.
    with torch.random.fork_rng(devices=devices), eval_mode(model):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        found |= _measure(model, x[rows], y[rows], eps=eps, known=known, rows=rows, seed=seed)
    return [
        Doubt(name, why, evidence, f"docs/doubts/{name}.md")
        for name, why in WHY.items()
        if (evidence := found.get(name)) is not None
    ]


def _measure(
    model: Model, x: Tensor, y: Tensor, *, eps: float, known: Mapping[str, Tensor], rows: Tensor, seed: int
) -> dict[str, str | None]:
    """Everything that runs the model: forward passes, then gradients, then attacks. `known` is of all images."""
    generator = torch.Generator(device=x.device)
    generator.manual_seed(seed)
    with torch.no_grad():
        logits, again = model(x), model(x)
        check_logits(logits, x, y)
        found = {
            "randomness-at-inference": randomness(logits, again),
            "probabilities-not-logits": probabilities(logits),
        }
        if found["randomness-at-inference"] is None and len(x) > 1:
            half = len(x) // 2
            found["batch-dependence"] = batch_dependence(logits[:half], model(x[:half]))
    clean = logits.argmax(dim=1) == y
    gradients = probes.gradients(model, x, y)
    if isinstance(gradients, str):
        return {**found, "non-differentiable": gradients}
    of_ce, of_margin = gradients
    found["zero-gradients"] = zero_gradients(of_ce[clean], of_margin[clean])
    found["vanishing-gradients"] = vanishing_gradients(of_ce[clean], of_margin[clean])

    told = {steps: known[name] for name in known if (steps := _steps(name))}  # the PGD family, by steps
    cw_told = next((known[name] for name in known if re.fullmatch("cw[0-9]*", name)), None)
    enough = sum(steps > 1 for steps in told) > 1
    walk = probes.ascent(model, x, y, eps=eps, steps=PGD_STEPS if enough else MANY_STEPS, check_after=PGD_STEPS)
    found["loss-does-not-grow"] = loss_does_not_grow(walk.first[clean], walk.last[clean])
    weaker = more_steps_weaker(told) or more_steps_weaker(walk.correct)
    if weaker:
        # Large steps of a fixed size overshoot on honest models too: if smaller ones reach what few large ones reached,
        # the gradient was meaningful after all.
        verdicts = [*(verdict[rows] for verdict in told.values()), *walk.correct.values()]
        lowest = min(verdicts, key=lambda verdict: int(verdict.sum()))
        settled = probes.settled(model, x, y, eps=eps, steps=MANY_STEPS)
        weaker = weaker if _excess(settled, lowest) > STEPS_GAP else None
    found["more-steps-weaker"] = weaker
    here = walk.correct[max(walk.correct)]
    if cw_told is None:
        cw = probes.standing(model, x, y, eps=eps, step_size=eps / 4, steps=CW_STEPS, loss="cw", generator=generator)
        found["cw-far-from-ce"] = cw_far_from_ce(here, cw)
    else:
        cw = cw_told[rows]
        found["cw-far-from-ce"] = cw_far_from_ce(told[max(told)], cw_told) if told else cw_far_from_ce(here, cw)

    everywhere = clean.clone()
    for radius in LARGE_EPS:  # an image stands only where it withstands every radius
        left = torch.nonzero(everywhere)[:, 0]
        everywhere[left] = probes.standing(
            model, x[left], y[left], eps=radius, step_size=radius / 10, steps=LARGE_STEPS, generator=generator
        )
    found["no-collapse-at-large-eps"] = no_collapse(everywhere, y)

    attacked = here.clone()
    for verdict in told.values():
        attacked &= verdict[rows]
    with torch.no_grad():
        drawn = ball.draw_uniform(x, generator)
        noisy = [model(ball.project(x + eps * noise, x, eps)).argmax(dim=1) == y for noise in (drawn, drawn.sign())]
    found["noise-hurts-as-much"] = noise_hurts_as_much(clean, min(noisy, key=lambda v: int(v.sum())), attacked)
    withstood = attacked & cw & clean
    for verdict in known.values():  # of AutoAttack too
        withstood &= verdict[rows]
    standing = torch.nonzero(withstood)[:, 0]
    blind = probes.square(model, x[standing], y[standing], eps=eps, queries=SQUARE_QUERIES, generator=generator)
    found["square-beats-white-box"] = square_beats_white_box(int((~blind).sum()), len(standing), len(x))
    return found


# The checks: measurements in, evidence or None out.


def train_mode(model: Model) -> str | None:
    """Whether the model, or a batch-norm or dropout of it, was handed over in train mode."""
    if not isinstance(model, nn.Module):
        return None
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    names = [name or "the model" for name, part in model.named_modules() if isinstance(part, kinds) and part.training]
    if not names and not model.training:
        return None
    listed = f", with {len(names)} batch-norm or dropout layers, the first {names[0]}" if names else ""
    return f"model.training is {model.training}{listed}. Call model.eval()."


def randomness(logits: Tensor, again: Tensor) -> str | None:
    """Whether two runs on the same images differ."""
    far = _apart(logits, again)
    changed = int((logits.argmax(dim=1) != again.argmax(dim=1)).sum())
    if not far > SAME_RUN:
        return None
    return f"Two runs in eval mode differ by {far:.2g} of the logits' spread; {changed} of {len(logits)} labels change."


def probabilities(logits: Tensor) -> str | None:
    """Whether every output is a row of probabilities."""
    sums = logits.double().sum(dim=1)
    in_range = bool(((logits >= 0) & (logits <= 1 + SUM_TO_ONE)).all())
    if not in_range or not bool(((sums - 1).abs() < SUM_TO_ONE).all()):
        return None
    return f"Each of {len(logits)} outputs lies in [0, 1] and sums to 1 (largest {logits.max().item():.6f})."


def batch_dependence(together: Tensor, apart: Tensor) -> str | None:
    """Whether an image's logits change when half of the batch is taken away."""
    far = _apart(together, apart)
    if not far > SAME_BATCH:
        return None
    return f"In half the batch the logits of the same {len(apart)} images differ by {far:.2g} of their spread."


def zero_gradients(of_ce: Tensor, of_margin: Tensor) -> str | None:
    """Whether too many correctly classified images have no gradient; both arguments are max |gradient| per image."""
    dead = ~(of_ce > 0)  # NaN is no gradient either
    if not _least(int(dead.sum()), len(dead)) > DEAD:
        return None
    saturated = int((dead & (of_margin > 0)).sum())
    cause = "the margin has one: the softmax is saturated" if 2 * saturated > int(dead.sum()) else "nor has the margin"
    return f"The cross-entropy has no gradient at {_of(dead)} correctly classified images; {cause}."


def vanishing_gradients(of_ce: Tensor, of_margin: Tensor) -> str | None:
    """Whether the gradient of the loss is there but lost next to that of the logits."""
    lost = (of_ce > 0) & (of_ce < VANISHED * of_margin)
    if not _least(int(lost.sum()), len(lost)) > VANISHED_SHARE:
        return None
    ratio = (of_ce[lost] / of_margin[lost]).median().item()
    return f"At {_of(lost)} correctly classified images its size is about {ratio:.0e} of the margin's gradient."


def loss_does_not_grow(first: Tensor, last: Tensor) -> str | None:
    """Whether the loss after many steps is above that after one step, image by image."""
    grown = last > first
    if len(grown) == 0 or not _most(int(grown.sum()), len(grown)) < GROWS:
        return None
    return f"From the first step of PGD to the last the loss grew for only {_of(grown)} images."


def more_steps_weaker(verdicts: Mapping[int, Tensor]) -> str | None:
    """Whether more steps of the same attack leave more images standing."""
    counts = sorted(verdicts)
    for fewer, more in itertools.pairwise(counts):
        least, most = verdicts[fewer], verdicts[more]
        if _excess(most, least) > STEPS_GAP:
            return f"Accuracy {_rate(least)} after {fewer} steps, {_rate(most)} after {more} ({len(most)} images)."
    return None


def cw_far_from_ce(ce: Tensor, cw: Tensor) -> str | None:
    """Whether the margin loss and the cross-entropy give numbers that cannot both be the truth."""
    if max(_excess(ce, cw), _excess(cw, ce)) <= CW_GAP:
        return None
    return f"Accuracy {_rate(ce)} under PGD on the cross-entropy, {_rate(cw)} on the margin ({len(ce)} images)."


def no_collapse(stands: Tensor, y: Tensor) -> str | None:
    """Whether images withstand radii at which there is nothing left to recognise."""
    most_frequent = torch.bincount(y).max().item() / len(y)
    if not _least(int(stands.sum()), len(stands)) > max(most_frequent, LARGE_FLOOR):
        return None
    radii = " and ".join(f"{radius:g}" for radius in LARGE_EPS)
    return f"At eps {radii}, {LARGE_STEPS} steps each, {_of(stands)} images are still classified correctly."


def noise_hurts_as_much(clean: Tensor, noise: Tensor, attack: Tensor) -> str | None:
    """Whether random noise breaks as many images as the attack, while the attack leaves images standing."""
    by_noise, by_attack = int((clean & ~noise).sum()), int((clean & ~attack).sum())
    if min(by_noise, int(attack.sum())) < NOISE_LEAST or by_noise < NOISE_SHARE * by_attack:
        return None
    return f"Of {int(clean.sum())} correctly classified images noise breaks {by_noise}, the attack {by_attack}."


def square_beats_white_box(broken: int, standing: int, n: int) -> str | None:
    """Whether a blind search breaks images that withstood every gradient attack."""
    if not _least(broken, n) > SQUARE_SHARE:
        return None
    return (
        f"Of the {n} images looked at {standing} withstood everything else; a blind search of {SQUARE_QUERIES} queries "
        f"breaks {broken} of these. The worst case still counts them as standing: the truth lies below it."
    )


def _steps(name: str) -> int | None:
    """The steps of an attack by its name: fgsm, pgd20, pgd100; None for another."""
    if name == "fgsm":
        return 1
    found = re.fullmatch("pgd([0-9]+)", name)
    return int(found[1]) if found else None


# Arithmetic of noise.


def _apart(left: Tensor, right: Tensor) -> float:
    """The largest difference, in units of the spread of the logits."""
    spread = left.double().std(correction=0).clamp_min(1e-12)
    return float(((left.double() - right.double()).abs().max() / spread).item())


def _least(k: int, n: int) -> float:
    """The smallest share that k of n still speaks for (Wilson's bound at Z standard deviations)."""
    return 1 - _most(n - k, n)


def _most(k: int, n: int) -> float:
    """The largest share that k of n still speaks for."""
    if n == 0:
        return 1.0
    p, z2 = k / n, Z * Z
    return (p + z2 / (2 * n) + Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)


def _excess(more: Tensor, fewer: Tensor) -> float:
    """How much higher the first accuracy is, paired image by image; 0 where that is within noise (McNemar)."""
    gained, lost = int((more & ~fewer).sum()), int((fewer & ~more).sum())
    if gained - lost <= Z * math.sqrt(gained + lost):
        return 0.0
    return (gained - lost) / len(more)


def _rate(verdict: Tensor) -> str:
    return f"{100 * verdict.double().mean().item():.1f} %"


def _of(verdict: Tensor) -> str:
    return f"{int(verdict.sum())} of {len(verdict)}"
