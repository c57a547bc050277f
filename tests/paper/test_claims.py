"""The checks of the line figures: every part of a claim can change the finding."""

from __future__ import annotations

import pytest

from sparring.paper import claims
from sparring.paper.claims import by_tau
from sparring.report.comparison import Ours

N = 10_000  # two standard errors of a difference are about 1 to 1.4 points


def by_radius(name, lines):
    return " ".join(claims.by_radius(name, lines))


def point(**accuracies):
    return {name.replace("_", "-"): Ours((value / 100,), N) for name, value in accuracies.items()}


def taus(natural, pgd20, cw30=None):
    rows = zip((0, 2, 10), natural, pgd20, cw30 or pgd20, strict=True)
    return {float(tau): point(natural=a, pgd20=b, cw30=c) for tau, a, b, c in rows}


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        (taus((87, 83, 79), (44, 49, 49.5)), "confirmed"),
        (taus((87, 83, 79), (44, 49, 52)), "confirmed in part"),  # still rising
        (taus((87, 83, 79), (44, 49, 46)), "confirmed in part"),  # falling
        (taus((87, 83, 79), (44, 49, 49), (44, 49, 52)), "confirmed in part"),  # under C&W only
        (taus((87, 83, 84.2), (44, 49, 49)), "confirmed in part"),  # natural accuracy does not fall throughout
        (taus((87, 83, 83.9), (44, 49, 49)), "confirmed"),  # within the noise of 10,000 images
        (taus((87, 83, 79), (44, 44.5, 45)), "confirmed in part"),  # robust accuracy does not rise
        (taus((87, 83, 79), (49, 44, 44)), "confirmed in part"),
        (taus((79, 83, 87), (49, 44, 44)), "not confirmed"),
        (taus((87, 86.9, 86.8), (44, 44, 44)), "not confirmed"),  # within the noise
    ],
)
def test_the_effect_of_tau(line, finding):
    assert by_tau("Net", line, 2.0).startswith(f"Net: {finding}. In points, natural ")


def test_the_numbers_of_tau():
    text = by_tau("Net", taus((87, 83, 79), (44, 49, 52)), 2.0)
    assert "natural -8.0 ± 1.1 in all, falling throughout" in text
    assert "in all, falling throughout except for 1 of 2 steps, within the noise;" in by_tau(
        "Net", taus((87, 83, 83.9), (44, 49, 52)), 2.0
    )
    assert "in all, not falling throughout;" in by_tau("Net", taus((87, 83, 84.2), (44, 49, 52)), 2.0)
    assert "PGD-20 +5.0 ± 1.4 up to tau 2 and +3.0 ± 1.4 from there to 10; C&W" in text


def test_too_few_taus_or_attacks_say_nothing():
    line = taus((87, 83, 79), (44, 49, 52))
    assert by_tau("Net", {tau: line[tau] for tau in (0.0, 10.0)}, 2.0) == ""
    assert by_tau("Net", {tau: line[tau] for tau in (0.0, 2.0)}, 2.0) == ""
    assert by_tau("Net", line | {5.0: point(natural=80)}, 2.0) == ""


FIRST = {"natural": 86, "pgd20": 30, "cw30": 31, "pgd20_2eps": 3}
LAST = {"natural": 70, "pgd20": 42, "cw30": 38, "pgd20_2eps": 20}
WORST_FIRST = {"natural": 79, "pgd20": 40, "cw30": 40, "pgd20_2eps": 10}
WORST_LAST = {"natural": 26, "pgd20": 23, "cw30": 22, "pgd20_2eps": 25}


def radii(first=FIRST, last=LAST, worst_first=WORST_FIRST, worst_last=WORST_LAST):
    return {
        "tau 0": {0.03: point(**first), 0.15: point(**last)},
        "Madry": {0.03: point(**worst_first), 0.06: point(**worst_first), 0.15: point(**worst_last)},
    }


def test_friendly_training_stands_at_large_radii():
    finding, line = claims.by_radius("Net", radii())
    assert finding == (
        "Net: confirmed (1 of 1 line: Madry loses natural and PGD-20 accuracy; the line loses less natural accuracy, "
        "gains at 2 eps, and ends ahead of Madry at eps). "
        "Madry in brackets; differences at the last radius are ± 1.3."
    )
    assert line.startswith("tau 0, radius 0.03 → 0.15: natural 86.0 → 70.0 (79.0 → 26.0), PGD-20 30.0 → 42.0 (40.0 ")
    # Behind Madry at 2 eps: reported, but not part of the claim.
    assert line.endswith("PGD-20 at 2 eps 3.0 → 20.0 (10.0 → 25.0).")


@pytest.mark.parametrize(
    "other",
    [
        {"last": LAST | {"natural": 26.5}},  # not ahead beyond the noise
        {"last": LAST | {"pgd20": 23}},
        {"last": LAST | {"cw30": 21}},
        {"last": LAST | {"pgd20_2eps": 3.1}},  # no gain under the stronger attack
        {"worst_first": WORST_FIRST | {"natural": 26}},  # Madry loses nothing
        {"worst_first": WORST_FIRST | {"pgd20": 23}},
        {"worst_first": WORST_FIRST | {"natural": 40}},  # Madry loses less
    ],
)
def test_every_part_of_the_claim_counts(other):
    assert by_radius("Net", radii(**other)).startswith("Net: not confirmed (0 of 1 line: ")


def test_several_lines_and_those_with_too_few_points():
    lines = radii()
    lines["tau 1"] = {0.03: point(**FIRST)}
    assert by_radius("Net", lines).endswith("Too few radii to compare with Madry: tau 1.")
    lines["tau 1"][0.06] = point(**(LAST | {"natural": 60}))
    text = by_radius("Net", lines)
    assert text.startswith("Net: confirmed in part (1 of 2 lines: ") and "tau 1, radius 0.03 → 0.06" in text
    assert by_radius("Net", {"Madry": lines["Madry"]}) == by_radius("Net", {"tau 0": lines["tau 0"]}) == ""
    without = {label: {x: {"natural": p["natural"]} for x, p in line.items()} for label, line in lines.items()}
    assert by_radius("Net", without) == ""


RADII = (0.03, 0.09, 0.15)


def strong(pgd20, cw30, autoattack):
    """A line by radius."""
    rows = zip(RADII, pgd20, cw30, autoattack, strict=True)
    return {radius: point(pgd20=a, cw30=b, autoattack=c) for radius, a, b, c in rows}


MADRY = strong((10, 25, 20), (10, 24, 19), (9, 22, 18))


@pytest.mark.parametrize(
    ("lines", "finding"),
    [
        ([strong((5, 20, 28), (5, 19, 27), (4, 18, 25))], "confirmed (1 of 1 line ahead"),
        ([strong((5, 20, 28), (5, 19, 22), (4, 18, 20))], "not confirmed beyond PGD-20 (0 of 1 line "),
        ([strong((5, 20, 28), (5, 19, 27), (4, 18, 22.5))], "not confirmed beyond PGD-20"),  # within the noise
        ([strong((5, 20, 25), (5, 19, 24), (4, 18, 22))], "not confirmed (0 of 1"),
        ([strong((5, 20, 28), (5, 19, 27), (4, 18, 25)), MADRY], "confirmed in part (1 of 2 lines"),
    ],
)
def test_the_best_radius_of_each_line(lines, finding):
    every = {"Madry": MADRY} | {f"tau {tau}": line for tau, line in enumerate(lines)}
    head, *each = claims.by_best("Net", every)
    assert head.startswith(f"Net: {finding}") and "Madry under PGD-20, C&W, AutoAttack alike" in head
    assert len(each) == len(lines)


def test_the_numbers_of_the_best_radius():
    _, line = claims.by_best("Net", {"Madry": MADRY, "tau 1": strong((5, 20, 28), (5, 19, 27), (4, 18, 25))})
    assert line == (
        "tau 1: PGD-20 28.0 at 0.15 against 25.0 at 0.09 (+3.0 ± 1.2), C&W 27.0 at 0.15 against 24.0 at 0.09 "
        "(+3.0 ± 1.2), AutoAttack 25.0 at 0.15 against 22.0 at 0.09 (+3.0 ± 1.2)."
    )


def test_other_radii_or_one_radius_are_not_compared():
    short = {radius: MADRY[radius] for radius in RADII[:2]}
    assert claims.by_best("Net", {"Madry": MADRY, "tau 0": short}) == []
    assert claims.by_best("Net", {"tau 0": MADRY}) == []
