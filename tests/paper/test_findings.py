"""Findings: made from the results, for every kind of item."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparring.paper import render, specs
from sparring.paper.collect import collect
from sparring.paper.findings import _pair, findings
from sparring.report.comparison import Ours, TableRow, noise_of, rounded
from tests.paper.test_render import points
from tests.paper.tiny import COURSE, TABLE

RESULTS = Path(__file__).parents[2] / "results"


def text_of(collected):
    return " ".join(findings(collected))


def against(collected, natural, pgd20, n):
    """The findings on FAT with these accuracies, against Madry with 80 and 50."""
    attacks = [
        {"attacks": {"natural": {"accuracy": a, "n": n}, "pgd10": {"accuracy": b, "n": n}}}
        for a, b in ((0.8, 0.5), (natural, pgd20))
    ]
    rows = ("madry", "fat")
    made = {
        (row, "lite"): [{**collected.found[row, "lite"][0], "found": f}] for row, f in zip(rows, attacks, strict=True)
    }
    return text_of(replace(collected, item=replace(TABLE, columns=TABLE.columns), found=made))


def noise(one, other, n):
    """For independent images: these results have no verdicts per image."""
    return rounded(200 * ((one * (1 - one) + other * (1 - other)) / n) ** 0.5)


@pytest.mark.parametrize(
    ("natural", "pgd20", "n", "finding", "sure"),
    [
        (0.85, 0.50, 10_000, "confirmed", "Natural"),
        (0.85, 0.49, 10_000, "confirmed", "Natural"),  # a point is within the noise
        (0.80, 0.55, 10_000, "confirmed under PGD alone", "PGD-20"),  # the other kind of gain
        (0.85, 0.45, 10_000, "a trade-off", "Natural, PGD-20"),
        (0.80, 0.50, 10_000, "not confirmed", ""),
        (0.75, 0.50, 10_000, "not confirmed", "Natural"),
        (0.85, 0.50, 100, "not confirmed", ""),  # five points are noise with a hundred images
    ],
)
def test_a_method_is_compared_with_its_baseline(measured, monkeypatch, natural, pgd20, n, finding, sure):
    monkeypatch.setattr("sparring.paper.findings._CLAIMED", ("natural", "pgd10"))  # ten steps are enough here
    text = against(collect(TABLE, measured / "results"), natural, pgd20, n)
    spelled = {
        "Natural": f"Natural {100 * (natural - 0.8):+.1f} ± {noise(0.8, natural, n)} (+2.0)",
        "PGD-20": f"PGD-20 {100 * (pgd20 - 0.5):+.1f} ± {noise(0.5, pgd20, n)} (+0.3)",
    }
    beyond = "; ".join(text for column, text in spelled.items() if column in sure)
    within = "; ".join(text for column, text in spelled.items() if column not in sure)
    parts = [
        f"FAT against Madry: {finding}.",
        beyond and f"Beyond the noise: {beyond}.",
        within and f"Within the noise: {within}.",
    ]
    assert text.startswith(" ".join(filter(None, parts)) + " In points, ")


def test_images_on_which_both_agree_add_no_noise():
    """The models differ on twenty images of a thousand: fifteen gained, five lost."""
    both = [index < 500 for index in range(980)]
    new, old = ([*both, *[first] * 15, *[not first] * 5] for first in (True, False))
    cells = [Ours((sum(right) / 1000,), 1000, (bytes(right),)) for right in (new, old)]
    assert noise_of(*cells) == pytest.approx(200 * ((0.020 - 0.010**2) / 1000) ** 0.5)
    unknown = [replace(cell, right=()) for cell in cells]
    assert noise_of(*unknown) > 4 * noise_of(*cells)
    assert noise_of(cells[0], unknown[1]) == noise_of(*unknown)  # verdicts of one model alone are of no use
    fewer = Ours((0.5,), 500, (bytes([1, 0] * 250),))
    assert noise_of(cells[0], fewer) == noise_of(unknown[0], replace(fewer, right=()))


def test_verdicts_of_several_seeds_are_averaged():
    cells = [Ours((0.5, 0.5), 4, (bytes(a), bytes(b))) for a, b in (([1, 1, 0, 0], [1, 0, 1, 0]), ([0, 0, 1, 1],) * 2)]
    differences = [1.0, 0.5, -0.5, -1.0]  # of the means 1, 0.5, 0.5, 0 and 0, 0, 1, 1
    assert noise_of(*cells) == pytest.approx(200 * (sum(d * d for d in differences) / 4 / 4) ** 0.5)


def test_the_spread_over_seeds_is_noise_too():
    old = TableRow("", "", {"Natural": Ours((0.80,), 10_000)})
    steady, scattered = (
        TableRow("", "", {"Natural": Ours(values, 10_000)}) for values in ((0.82, 0.82, 0.82), (0.79, 0.82, 0.85))
    )
    assert ": confirmed. Beyond" in _pair(steady, old, {"Natural": "natural"})
    assert ": not confirmed. Within the noise" in _pair(scattered, old, {"Natural": "natural"})
    # Variances in points: of the images; of a median of three, which varies more than a mean; of one such seed.
    variance = 0.82 * 0.18 + 0.8 * 0.2 + math.pi / 2 * 9 / 3 + 9
    assert noise_of(scattered.ours["Natural"], old.ours["Natural"]) == pytest.approx(2 * variance**0.5)
    assert noise_of(old.ours["Natural"], scattered.ours["Natural"]) == pytest.approx(2 * variance**0.5)


def test_the_variance_of_a_median_over_seeds_matches_simulation():
    random, spread, count = np.random.default_rng(0), 0.02, 5
    medians = 100 * np.median(random.normal(0.5, spread, (20_000, count)), axis=1)
    values = 0.5 + spread * np.array([-1.0, -1.0, 0.0, 1.0, 1.0])  # with this standard deviation
    cell = Ours(tuple(values), 10**9)
    assert noise_of(cell, cell) == pytest.approx(2 * 2**0.5 * medians.std(), rel=0.1)


def test_no_difference_is_within_the_noise():
    line = TableRow("", "", {"Natural": Ours((1.0,), 100)})
    assert "Within the noise: Natural +0.0 ± 0.0." in _pair(line, line, {"Natural": "natural"})


@pytest.mark.parametrize(("attack", "finding"), [("autoattack", ""), ("cw30", ""), ("pgd100", " under PGD alone")])
def test_a_gain_under_pgd_counts_fully_if_another_attack_shares_it(attack, finding):
    new, old = (
        TableRow("", "", {"PGD-20": Ours((robust,), 10_000), "Other": Ours((robust,), 10_000)})
        for robust in (0.55, 0.50)
    )
    assert f": confirmed{finding}. Beyond" in _pair(new, old, {"PGD-20": "pgd20", "Other": attack})


@pytest.mark.parametrize(
    ("attack", "finding"), [("autoattack", "a trade-off"), ("cw30", "a trade-off"), ("fgsm", "confirmed")]
)
def test_a_loss_under_any_attack_but_fgsm_counts(attack, finding):
    new, old = (
        TableRow("", "", {"Natural": Ours((natural,), 10_000), "Other": Ours((robust,), 10_000)})
        for natural, robust in ((0.85, 0.45), (0.80, 0.50))
    )
    assert f": {finding}. Beyond the noise: Natural +5.0 ± 1.1; Other -5.0 ± 1.4." in _pair(
        new, old, {"Natural": "natural", "Other": attack}
    )


def test_every_friendly_row_of_the_tables_has_its_original_as_baseline():
    for name in ("table1", "table2", "table3", "table4"):
        rows = {row.name: row for row in specs.find(name).rows}
        for row in rows.values():
            friendly = row.name.startswith("fat") and not row.name.endswith("larger")
            if friendly:
                ours, theirs = (one.configs["full"].objective for one in (row, rows[row.against]))
                assert theirs.name == ours.name.replace("fat-", "").replace("fat", "madry")
                assert getattr(theirs, "beta", None) == getattr(ours, "beta", None)


def test_findings_on_a_course(measured):
    collected = collect(COURSE, measured / "results")
    course = collected.of(COURSE.rows[0])[0]["history"]["backprops"]
    grown = "confirmed (one run)" if course[-1] > course[0] else "not confirmed (one run)"
    saved = 1 - sum(course) / len(course) / 2
    assert text_of(collected).startswith(grown)
    assert f"{course[0]:.1f} backward passes per image in the first epoch and {course[-1]:.1f} in the last" in text_of(
        collected
    )
    assert text_of(collected).endswith(f"a whole run saves {saved:.0%} of K.")
    never = {**collected.of(COURSE.rows[0])[0], "history": {"backprops": [2.0, 2.0]}}  # always K steps
    assert text_of(replace(collected, found={("fat", "lite"): [never]})) == "no friendly run is measured yet."


def test_findings_on_lines(measured, tmp_path):
    item = points(measured, tmp_path)
    text = text_of(collect(replace(item, marks=(1.0,)), tmp_path / "results"))
    assert text == "one, tau 0 → 1 → 5: Natural 0.0 → 1.0 → 5.0. two, tau 0 → 1 → 5: Natural 10.5 → 11.5 → 15.5."
    alone = tuple(replace(row, group="net") for row in item.rows if row.label == "one")
    assert text_of(collect(replace(item, rows=alone), tmp_path / "results")) == "one, tau 0 → 5: Natural 0.0 → 5.0."
    rows = tuple(replace(row, group="both") for row in item.rows)
    text = text_of(collect(replace(item, rows=rows), tmp_path / "results"))
    assert text == "both, tau 0 → 5: Natural one 0.0 → 5.0, two 10.5 → 15.5."
    fewer = tuple(row for row in rows if row.label == "one" or row.x < 5)
    text = text_of(collect(replace(item, rows=fewer), tmp_path / "results"))
    assert text.startswith("both, tau 0 → 5: Natural one 0.0 → 5.0. both, tau 0 → ") and "Natural two 10.5 → " in text


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fig-motivation", ["confirmed (5 of 5 seeds)", "76% to 94%", "10% to 24%"]),
        ("fig-loss", ["confirmed (4 of 4 seeds)", "Both exceed 1"]),
        (
            "fig-mixture",
            [
                "bird and deer: confirmed in part",
                "truck: confirmed in part. Relative to natural data, PGD-20-0 mixes the classes less than PGD-20 in 3",
                "PGD-20-0 data by themselves are no purer than PGD-20 data in 3 of 3 layers: 71% of their neighbours",
            ],
        ),
        (
            "table1",
            [
                "FAT 8/255 against Madry: a trade-off. Beyond the noise: Natural +4.7 ± 0.5 (+2.0); FGSM +1.4 ± 0.6 (",
                "FAT 16/255 against Madry: a trade-off. Beyond the noise: Natural -0.8 ± 0.5 (-0.3); FGSM +0.8 ± 0.6",
                "In points, ± two standard errors paired by image, without the spread over seeds; in brackets",
            ],
        ),
        (
            "table2",
            ["8/255 against TRADES: a trade-off. Beyond the noise: Natural", "16/255 against TRADES: not confirmed."],
        ),
        ("table4", ["8/255 against MART: confirmed. Beyond the noise: Natural", "16/255 against MART: a trade-off."]),
        ("table3", ["not yet measured."]),
        (
            "fig-tau",
            [
                "Small CNN: confirmed in part. In points, natural -8.2 ± 0.7 in all, falling throughout except for 1",
                "Small CNN, tau 0 → 2 → 10: Natural 85.9 → 82.6 → 77.7; PGD-20 38.3 → 43.0 → 45.3.",
                "ResNet-18: confirmed in part. In points, natural -7.8 ± 0.6 in all, falling throughout; PGD-20 +5.5",
                "ResNet-18, tau 0 → 2 → 10: Natural 86.7 → 83.3 → 78.8; PGD-20 43.5 → 49.0 → 50.0.",
                "In points, ± two standard errors paired by image, without the spread over seeds.",
            ],
        ),
        (
            "fig-bps",
            [
                "confirmed (8 of 8 runs)",
                "1.6 to 4.4 backward passes per image in the first epoch and 6.5 to 8.0 in the last",
            ],
        ),
        (
            "fig-eps",
            [
                "FAT, ResNet-18, CIFAR-10, K 10 (Figure 6): confirmed (",
                "tau 0, radius 0.03 → 0.15: natural 86.0 → 70.1 (78.6 → 25.6), PGD-20 29.9 → 42.1 (40.4 → 23.0), C&W",
            ],
        ),
    ],
)
def test_the_findings_on_the_repositorys_results(name, parts):
    collected = collect(specs.find(name), RESULTS)
    for part in parts:
        assert part in text_of(collected), text_of(collected)


def test_a_caption_names_the_seed_drawn_and_the_range_over_all():
    (picture,) = render.exhibit(collect(specs.find("fig-motivation"), RESULTS)).pictures
    assert "Seed 0 is drawn; in brackets, the range over seeds 0, 1, 2, 3 and 4." in picture.caption
    assert "(76% to 94%)" in picture.caption
