"""How long an evaluation will take on this machine, from the time of its forward pass over the natural images.

Pure arithmetic; knows no model. An attack's step is a forward and a backward pass to the pixels; AutoAttack is not
counted, because its time depends on how many images withstand.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparring.evaluation.protocols import Settings

_STEP = 2.2  # forward passes: ResNet-18 2.1, Small CNN 2.3 on a CPU with AVX-512
_CHECKS = 320  # forward passes of an image that the sanity checks cost: 1.5 s where PGD-20 and C&W-30 took 0.96 s
_SHORT = 10.0  # seconds: less is not worth a line


def forward_passes(attacks: Sequence[Settings], seeds: int) -> float:
    """Forward passes of an image, with what gradients cost in that unit."""
    repeats = [(s, (seeds if s.random else 1) * s.restarts) for s in attacks if s.loss != "autoattack"]
    return sum(times * (_STEP * s.steps + 1) for s, times in repeats)


def announcement(
    forward_s: float, attacks: Sequence[Settings], *, seeds: int, images: int, checked: int, threads: int
) -> str:
    """'about 4 minutes on this machine (2 threads)'; empty for a short evaluation.

    Args:
        forward_s: seconds of a forward pass, per image.
        checked: images of the sanity checks.
    """
    seconds = forward_s * (images * forward_passes(attacks, seeds) + checked * _CHECKS)
    if seconds < _SHORT:
        return ""
    besides = ", AutoAttack not counted" if any(s.loss == "autoattack" for s in attacks) else ""
    plural = "" if threads == 1 else "s"
    return f"about {duration(seconds)} on this machine ({threads} thread{plural}){besides}"


def duration(seconds: float) -> str:
    """'40 s', '4 minutes', '3.5 hours'."""
    if seconds < 90:
        return f"{round(seconds / 5) * 5} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
