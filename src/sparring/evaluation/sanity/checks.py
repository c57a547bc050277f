"""The sanity checks: pure functions of measurements, each returning its evidence or None.

After the checklists of Athalye et al., "Obfuscated gradients give a false sense of security" (Sec. 3.1), and of
Carlini et al., "On evaluating adversarial robustness", and the flags AutoAttack raises. A difference counts only where
it exceeds the sampling noise of n images. Nothing here runs a model: `measure` does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparring.attacks.checks import Model, not_finite

WHY = {
    "logits-not-finite": "a prediction from NaN or infinite logits means nothing, and neither does an accuracy.",
    "train-mode": "in train mode batch-norm and dropout compute a different function for every batch.",
    "randomness-at-inference": "an attack on one draw of a random model says little about the next draw.",
    "probabilities-not-logits": "a softmax inside the model flattens the loss, which blinds attacks made for logits.",
    "batch-dependence": "a prediction that depends on the other images in the batch is not a property of the image.",
    "non-differentiable": "no gradient reaches the image, so a gradient attack cannot even start.",
    "gradients-not-finite": "where a gradient is NaN or infinite an attack loses its way, though the logits are fine.",
    "zero-gradients": "where the gradient is zero PGD does not move, so the image counts as robust unattacked.",
    "vanishing-gradients": "a saturated loss leaves a gradient of rounding errors, and PGD follows those.",
    "loss-does-not-grow": "an attack that does not increase the loss is not attacking: its gradient is no use.",
    "more-steps-weaker": "more steps can only help an attack that follows a meaningful gradient.",
    "cw-far-from-ce": "two losses with one goal disagree, so at least one is blind; trust at most the lower number.",
    "no-collapse-at-large-eps": "so far out any image can turn grey: a model that is still right was not attacked.",
    "noise-hurts-as-much": "an attack that does no better than random noise has found nothing.",
    "smoothing-beats-gradient": "where averaging gradients finds what the gradient does not, the gradient is masked.",
    "square-beats-white-box": "knowing the gradient should help; if a blind search does better, the gradient misleads.",
}

# Noise: three standard deviations, one-sided, so a check without cause fires in about 1 of 700 evaluations.
Z = 3.0
# Two runs on the same batch agree bit for bit on a CPU, to about 1e-6 on a GPU; relative to the logits' spread.
SAME_RUN = 1e-4
# Another batch size may select another kernel, in TF32 or bf16: differences of about 1e-3 to 1e-2.
SAME_BATCH = 0.05
# A row of probabilities sums to 1 within the rounding of half precision.
SUM_TO_ONE = 2e-3
# Tolerated share of correctly classified images without a gradient: dead units and very confident images exist.
DEAD = 0.05
# CE gradient over margin gradient is the probability of being wrong. Below 1e-12 (a gap of 28 between logits) float32
# has long lost the term of the true class (1 - p_y rounds to 0 at 6e-8); honest networks have a gap of 5 to 20.
VANISHED, VANISHED_SHARE = 1e-12, 0.25
# From the first step to the last the loss of nearly every image increases on an honest network; of half, by chance.
GROWS = 0.75
# C&W is 0 to 6 points below CE on published ResNet-18 (PGD-AT 1.6, TRADES 3.1, MART 5.7): far is well beyond that.
CW_GAP = 0.10
# PGD-100 against PGD-20: smaller differences than this do not matter.
STEPS_GAP = 0.01
# At 0.5 every image can be turned into the same grey one: no classifier can be right on more than one class.
LARGE_EPS, LARGE_STEPS, LARGE_FLOOR = (0.5, 1.0), 40, 0.05
# Noise breaks few images compared to an attack; with fewer than this many broken or robust there is nothing to compare.
NOISE_SHARE, NOISE_LEAST = 0.9, 10
# PGD on gradients averaged over the ball: on honest networks weaker than restarts of PGD, which use more gradients. Of
# 256 images it breaks 0 or 1 that those do not, and up to 5 of fat-digits at eps 0.3 (238 runs on 33 networks); 8 raise
# a doubt.
SMOOTH_SHARE, SMOOTH_STEPS, SMOOTH_SAMPLES = 0.01, 20, 2
# A blind search breaks almost none of the images that gradient attacks of twice the budget cannot break.
SQUARE_SHARE, SQUARE_QUERIES = 0.01, 200
_STILL_COUNTED = "The worst case still counts them as robust: the true accuracy is lower."


def train_mode(model: Model) -> str | None:
    """Whether the model, or one of its batch-norm or dropout layers, was passed in train mode."""
    if not isinstance(model, nn.Module):
        return None
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    names = [name or "the model" for name, part in model.named_modules() if isinstance(part, kinds) and part.training]
    if not names and not model.training:
        return None
    listed = f", with {len(names)} batch-norm or dropout layers, the first {names[0]}" if names else ""
    return f"model.training is {model.training}{listed}. Call model.eval()."


def logits_not_finite(logits: Tensor) -> str | None:
    """Whether some logits are NaN or infinite."""
    broken = not_finite(logits)
    return f"The {broken}; no other check was run." if broken else None


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


def batch_dependence(full: Tensor, fewer: Tensor, where: str) -> str | None:
    """Whether images' logits change in a smaller batch; `where` names it: 'In half the batch'.

    Half of a batch shows what is taken from its order and size. A single image shows statistics of the batch, which
    half of it hardly changes.
    """
    far = _apart(full, fewer)
    if not far > SAME_BATCH:
        return None
    return f"{where} the logits of the same {len(fewer)} images differ by {far:.2g} of their spread."


def gradients_not_finite(*sizes: Tensor) -> str | None:
    """Whether an image has a gradient that is no number; the arguments are max |gradient| per image at some points."""
    bad = torch.stack([~size.isfinite() for size in sizes]).any(dim=0)
    if not bad.any():
        return None
    return f"It has NaN or infinite numbers at {_of(bad)} images, or at random points near them."


def zero_gradients(of_ce: Tensor, of_margin: Tensor) -> str | None:
    """Whether too many correctly classified images have no gradient; both arguments are max |gradient| per image."""
    dead = ~(of_ce > 0)  # NaN counts as no gradient
    if not _lower(int(dead.sum()), len(dead)) > DEAD:
        return None
    saturated = int((dead & (of_margin > 0)).sum())
    cause = "the margin has one: the softmax is saturated" if 2 * saturated > int(dead.sum()) else "nor has the margin"
    return f"The cross-entropy has no gradient at {_of(dead)} correctly classified images; {cause}."


def vanishing_gradients(of_ce: Tensor, of_margin: Tensor) -> str | None:
    """Whether the gradient of the loss exists but is negligible next to that of the logits."""
    lost = (of_ce > 0) & (of_ce < VANISHED * of_margin)
    if not _lower(int(lost.sum()), len(lost)) > VANISHED_SHARE:
        return None
    ratio = (of_ce[lost] / of_margin[lost]).median().item()
    return f"At {_of(lost)} correctly classified images its size is about {ratio:.0e} of the margin's gradient."


def loss_does_not_grow(first: Tensor, last: Tensor) -> str | None:
    """Whether the loss after many steps is above the loss after one step, image by image."""
    grown = last > first
    if len(grown) == 0 or not _upper(int(grown.sum()), len(grown)) < GROWS:
        return None
    return f"From the first step of PGD to the last the loss grew for only {_of(grown)} images."


def more_steps_weaker(verdicts: Mapping[int, Tensor]) -> str | None:
    """Whether more steps of the same attack break fewer images."""
    counts = sorted(verdicts)
    for fewer, more in itertools.pairwise(counts):
        least, most = verdicts[fewer], verdicts[more]
        if excess(most, least) > STEPS_GAP:
            return f"Accuracy {_rate(least)} after {fewer} steps, {_rate(most)} after {more} ({len(most)} images)."
    return None


def cw_far_from_ce(ce: Tensor, cw: Tensor) -> str | None:
    """Whether the margin loss and the cross-entropy give accuracies that cannot both be right."""
    if max(excess(ce, cw), excess(cw, ce)) <= CW_GAP:
        return None
    return f"Accuracy {_rate(ce)} under PGD on the cross-entropy, {_rate(cw)} on the margin ({len(ce)} images)."


def no_collapse(correct: Tensor, y: Tensor, at: Sequence[float] = LARGE_EPS) -> str | None:
    """Whether images withstand radii at which nothing is left to recognise."""
    most_frequent = torch.bincount(y).max().item() / len(y)
    if not _lower(int(correct.sum()), len(correct)) > max(most_frequent, LARGE_FLOOR):
        return None
    radii = " and ".join(f"{radius:g}" for radius in at)
    return f"At eps {radii}, {LARGE_STEPS} steps each, {_of(correct)} images are still classified correctly."


def noise_hurts_as_much(clean: Tensor, noise: Tensor, attack: Tensor) -> str | None:
    """Whether random noise breaks as many images as the attack, while the attack leaves some unbroken."""
    by_noise, by_attack = int((clean & ~noise).sum()), int((clean & ~attack).sum())
    if min(by_noise, int(attack.sum())) < NOISE_LEAST or by_noise < NOISE_SHARE * by_attack:
        return None
    return f"Of {int(clean.sum())} correctly classified images noise breaks {by_noise}, the attack {by_attack}."


def smoothing_beats_gradient(broken: int, withstood: int, n: int) -> str | None:
    """Whether PGD on a smoothed gradient breaks images that PGD on the gradient itself does not.

    Args:
        broken: images that the smoothed gradient breaks, and restarts of PGD with more gradients do not.
        withstood: images that it was run on: those that withstood every attack of the evaluation.
        n: images checked in all.
    """
    if not _lower(broken, n) > SMOOTH_SHARE:
        return None
    return (
        f"Of the {n} images checked {withstood} withstood everything else; {SMOOTH_STEPS} steps along gradients "
        f"averaged over the ball break {broken} of these that restarts of PGD do not. {_STILL_COUNTED}"
    )


def square_beats_white_box(broken: int, withstood: int, n: int) -> str | None:
    """Whether a blind search breaks images that gradient attacks of twice the budget do not.

    Args:
        broken: images that the search breaks and the gradient attacks do not.
        withstood: images that the search was run on: those that withstood every attack of the evaluation.
        n: images checked in all.
    """
    if not _lower(broken, n) > SQUARE_SHARE:
        return None
    return (
        f"Of the {n} images checked {withstood} withstood everything else; a blind search of {SQUARE_QUERIES} queries "
        f"breaks {broken} of these that PGD with twice as many gradients does not. {_STILL_COUNTED}"
    )


def excess(more: Tensor, fewer: Tensor) -> float:
    """How much higher the first accuracy is, paired image by image; 0 where that is within noise (McNemar)."""
    gained, lost = int((more & ~fewer).sum()), int((fewer & ~more).sum())
    if gained - lost <= Z * math.sqrt(gained + lost):
        return 0.0
    return (gained - lost) / len(more)


def _apart(left: Tensor, right: Tensor) -> float:
    """The largest difference, in units of the spread of the logits."""
    spread = left.double().std(correction=0).clamp_min(1e-12)
    return float(((left.double() - right.double()).abs().max() / spread).item())


def _lower(k: int, n: int) -> float:
    """The lower bound on a share of which k of n were seen (Wilson's interval at Z standard deviations)."""
    return 1 - _upper(n - k, n)


def _upper(k: int, n: int) -> float:
    """The upper bound on a share of which k of n were seen."""
    if n == 0:
        return 1.0
    p, z2 = k / n, Z * Z
    return (p + z2 / (2 * n) + Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)


def _rate(verdict: Tensor) -> str:
    return f"{100 * verdict.double().mean().item():.1f} %"


def _of(verdict: Tensor) -> str:
    return f"{int(verdict.sum())} of {len(verdict)}"
