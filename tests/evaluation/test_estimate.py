"""The time of an evaluation, estimated from that of a forward pass."""

from __future__ import annotations

import pytest

from sparring.evaluation import estimate
from sparring.evaluation.protocols import Settings

PGD = Settings(eps=0.1, steps=10, step_size=0.01, loss="ce", start="uniform", restarts=2)
FGSM = Settings(eps=0.1, steps=1, step_size=0.1, loss="ce", start=None)
SUITE = Settings(eps=0.1, loss="autoattack")


def test_steps_restarts_and_seeds_count():
    assert estimate.forward_passes([PGD], 3) == pytest.approx(6 * (2.2 * 10 + 1))
    assert estimate.forward_passes([FGSM, SUITE], 3) == pytest.approx(2.2 + 1)


@pytest.mark.parametrize(
    ("forward_s", "attacks", "said"),
    [
        (0.02, [FGSM], ""),
        (0.1, [FGSM], "about 30 s on this machine (2 threads)"),
        (0.1, [PGD], "about 8 minutes on this machine (2 threads)"),
        (2.0, [PGD, SUITE], "about 2.6 hours on this machine (2 threads), AutoAttack not counted"),
    ],
)
def test_in_words(forward_s, attacks, said):
    assert estimate.announcement(forward_s, attacks, seeds=1, images=100, checked=0, threads=2) == said


def test_the_checks_count_and_one_thread_is_one():
    said = estimate.announcement(0.1, [], seeds=1, images=100, checked=10, threads=1)
    assert said == "about 5 minutes on this machine (1 thread)"
