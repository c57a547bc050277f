"""Our numbers beside published ones: cells, rounding, and the Markdown table."""

from __future__ import annotations

import pytest

from sparring.report.comparison import Ours, TableRow, best, markdown, rounded, spell

MADRY = TableRow("Madry", "ResNet-18", {"Natural": Ours((0.85,), 100), "PGD-20": Ours((0.5,), 100)}, {}, "", 10.0)
FAT = TableRow(
    "FAT",
    "ResNet-18",
    {"Natural": Ours((0.88, 0.86, 0.87), 100)},
    {"Natural": (89.34, 0.221)},
    "WRN-32-10",
    5.04,
)
NONE = TableRow("DAT", "", {}, {"PGD-20": (48.7, None)}, "WRN-32-10")


def test_several_seeds_are_a_median_and_a_standard_deviation():
    cell = FAT.ours["Natural"]
    assert (cell.median, cell.spread) == (pytest.approx(87.0), pytest.approx(1.0))
    assert cell.text == "87.00 ± 1.00"
    assert MADRY.ours["Natural"].text == "85.00" and MADRY.ours["Natural"].spread is None
    assert spell((48.7, None)) == "48.70" and spell((89.34, 0.221)) == "89.34 ± 0.22"


def test_a_single_number_is_not_the_best():
    assert best([MADRY, FAT, NONE], "Natural") == "87.00 ± 1.00"
    assert best([MADRY, FAT, NONE], "PGD-20") is None


def test_markdown():
    assert markdown(["Natural", "PGD-20"], [MADRY, FAT, NONE]).splitlines() == [
        "|  |  | Natural | PGD-20 | BPs |",
        "| --- | --- | ---: | ---: | ---: |",
        "| Madry | ours, ResNet-18 | 85.00 | 50.00 | 10.0 |",
        "| FAT | ours, ResNet-18 | **87.00 ± 1.00** |  | 5.0 |",
        "|  | paper, WRN-32-10 | 89.34 ± 0.221 |  |  |",
        "| DAT | ours: not yet measured |  |  |  |",
        "|  | paper, WRN-32-10 |  | 48.70 |  |",
    ]


def test_halves_are_rounded_up_whatever_their_binary_value():
    assert [rounded(number) for number in (79.35, 80.65, 53.85, 2.25, 0.049)] == ["79.4", "80.7", "53.9", "2.3", "0.0"]
    assert [rounded(number, sign=True) for number in (81.28 - 79.35, 78.69 - 76.14, -0.95, -0.04)] == [
        "+1.9",
        "+2.6",
        "-1.0",
        "+0.0",
    ]
