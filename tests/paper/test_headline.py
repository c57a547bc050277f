"""The headline: the rows that are measured, with the paper's numbers in brackets."""

from __future__ import annotations

import pytest

from sparring.paper import headline, results, specs
from sparring.report.comparison import rounded
from tests.paper.test_collect import copy
from tests.paper.tiny import TABLE, planned


def test_the_headline_has_the_rows_that_are_measured(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(specs, "ITEMS", {TABLE.name: TABLE})
    monkeypatch.setattr(headline, "ROWS", {TABLE.name: ("madry", "fat")})
    assert headline.headline(tmp_path) == ""
    copy(measured, tmp_path)
    found = results.read(planned(TABLE, measured)[1].path)
    natural, robust = (100 * found["found"]["attacks"][name]["accuracy"] for name in ("natural", "pgd10"))
    table = headline.headline(tmp_path / "results").splitlines()
    assert table[0] == "|  | Natural | PGD-20 | C&W | AutoAttack | BPs |"
    backprops = sum(found["history"]["backprops"]) / 2
    assert table[2] == f"| FAT | {rounded(natural)} (89.3) | {rounded(robust)} (46.1) |  |  | {backprops:.1f} |"
    assert len(table) == 5
    assert table[4].startswith("Ours: Tiny CNN, 2 epochs, 1 seed. Hardware: ")
    assert f"Attacks: n = {found['found']['n']} test images." in table[4]
    assert table[4].endswith(f"`sparring reproduce {TABLE.name}`.")
    assert len(headline.headline(measured / "results").splitlines()) == 6


@pytest.mark.parametrize("item", headline.ROWS)
def test_the_headlines_rows_and_columns_exist(item):
    assert set(headline.ROWS[item]) <= {row.name for row in specs.find(item).rows}
    assert set(headline.COLUMNS) <= set(specs.find(item).columns)
