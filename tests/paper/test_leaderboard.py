"""A benchmark beside our results: the table, where ours stand, and the picture."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sparring.paper import leaderboard, render, results, specs
from sparring.paper.collect import collect
from sparring.paper.findings import findings
from sparring.paper.specs import PublishedMethod, Robustness
from sparring.report import scatter as pictures
from sparring.report.page import write_page
from sparring.report.scatter import Dot, scatter
from tests.paper.tiny import TABLE, planned

OTHERS = (
    PublishedMethod("Weak", 70.0, 50.0, 49.0, 48.0, 45.0, 0.5, 1800.0, 1.4),
    PublishedMethod("Strong", 90.0, 61.0, 60.5, 60.0, 59.0, 0.1, 7000.0, 2.5),
    PublishedMethod("Broken", 85.0, 50.0, 40.0, 30.0, 20.0, 9.0, 3600.0, 1.0),
)
ITEM = replace(
    TABLE,
    name="board-tiny",
    kind="benchmark",
    rows=tuple(replace(row, measure=Robustness("quick", autoattack=100), paper={}) for row in TABLE.rows),
    columns={"Natural": "natural", "PGD-10": "pgd10", "AutoAttack": "autoattack"},
    others=OTHERS,
)


@pytest.fixture
def board(measured, tmp_path):
    """Both methods with made-up accuracies: Madry 80 natural and 50 AutoAttack, FAT 86 and 47."""
    for job, (natural, autoattack) in zip(planned(ITEM, tmp_path), ((80, 50), (86, 47)), strict=True):
        source = results.read(planned(TABLE, measured)[1].path)
        attacks = {
            name: {"accuracy": right / 100, "n": 100, "right": results.pack([i < right for i in range(100)])}
            for name, right in (("natural", natural), ("pgd10", 55), ("autoattack", autoattack))
        }
        own = {"row": job.row.name, "found": {"attacks": attacks}, "wall_seconds": 400.0, "peak_memory_gib": 4.5}
        own["history"] = source["history"] | {"backprops": [2.0, 2.0] if job.row.name == "madry" else [0.5, 1.0]}
        results.write(job.path, {**source, **job.declared, **own})
    return collect(ITEM, tmp_path / "results")


def test_the_table_has_ours_and_theirs_with_costs(board):
    found = leaderboard.board(board)
    assert [line.name for line in found.lines] == ["Madry", "FAT", "Strong", "Weak", "Broken"]
    assert list(found.columns) == ["Natural", "PGD-10", "AutoAttack", "seconds", "GiB"]
    ours, theirs = found.lines[1], found.lines[2]
    assert dict(ours.numbers) == {
        "Natural": "86.00", "PGD-10": "55.00", "AutoAttack": "47.00", "seconds": "400", "GiB": "4.50",
    }  # fmt: skip
    assert theirs.numbers["AutoAttack"] == "59.00 ± 0.10" and theirs.numbers["seconds"] == "7,000"
    assert (ours.ours, theirs.ours) == (True, False)


def test_seconds_are_those_of_the_epochs_where_no_more_is_known():
    where = {"trained_on": [{"device": "GPU", "at_once": 1}]}
    several = [{"training_seconds": 9.0, "wall_seconds": None} | where, {"training_seconds": 5.0} | where]
    assert leaderboard.seconds(several) == 7
    beside = {"training_seconds": 1.0, "trained_on": [{"device": "GPU", "at_once": 3}]}
    assert leaderboard.seconds([*several, beside]) == 7 and leaderboard.at_once([*several, beside]) == 1


def test_seconds_beside_other_runs_are_marked_and_not_compared(board):
    shared = [result | {"trained_on": [{"device": "GPU", "at_once": 3}]} for result in board.of(ITEM.rows[1])]
    found = replace(board, found={**board.found, (ITEM.rows[1].name, "lite"): shared})
    assert leaderboard.board(found).lines[1].numbers["seconds"] == "400 (3 at once)"
    assert any(line.startswith("Training takes 400 s (ours)") for line in findings(found))
    alone = replace(found, found={(ITEM.rows[1].name, "lite"): shared})
    assert not any(line.startswith("Training takes") for line in findings(alone))


def test_where_ours_stand(board):
    madry, fat, noise, seconds, pair, _errors = findings(board)
    assert madry == (
        "Madry (80.0 natural, 50.0 AutoAttack): better in both than 1 of 3 published methods, worse in both than "
        "Strong."
    )
    assert "better in both than 2 of 3" in fat
    assert "less than 10.0 points" in noise  # 100 images, half of them right
    assert seconds.startswith("Training takes 400 s (ours) and 1,800 to 7,000 s (theirs).")
    assert pair.startswith("FAT against Madry. ") and "confirmed" not in pair and "(" not in pair


def test_one_method_alone_is_compared_with_none_of_ours(board):
    alone = findings(replace(board, found={key: value for key, value in board.found.items() if key[0] == "fat"}))
    assert [line.partition(" ")[0] for line in alone] == ["FAT", "A", "Training", "Not"]


def test_files_and_page(board, tmp_path):
    table, picture = render.draw(board)
    assert (table.name, picture.name) == ("table.md", "board-tiny.png")
    text = table.read_text(encoding="utf-8")
    assert "| **FAT** | ours, Tiny CNN, 2 epochs, 1 seed | 86.00 | 55.00 | 47.00 | 400 | 4.50 |" in text
    assert "| Weak | theirs, 3 seeds | 70.00 | 50.00 | 45.00 ± 0.50 | 1,800 | 1.40 |" in text
    assert "the paper" not in text
    caption = leaderboard.pictures(board)["board-tiny"].caption
    assert (
        "FAT 86.0 and 47.0 in 400 s" in caption
        and "below the picture: Weak 70.0 and 45.0; Broken 85.0 and 20.0." in caption
    )
    shown = render.exhibit(board)
    write_page(tmp_path / "page.html", title="t", lead="l", exhibits=[shown], facts={})
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What is asked:" in page and "of the paper" not in page and "59.00 ± 0.10" in page


def test_nothing_is_drawn_without_a_result_of_ours(tmp_path):
    collected = collect(specs.find("fastat"), tmp_path)
    assert leaderboard.pictures(collected) == {}
    assert sum(line.ours and not line.numbers for line in leaderboard.board(collected).lines) == 8


def test_names_stay_inside_and_ours_are_drawn_in_colour():
    crowd = [Dot(f"method {i}", 80 + 0.02 * i, 50 - 0.02 * i, 2000.0) for i in range(9)]
    png = scatter([*crowd, Dot("ours", 85, 49, 400.0, ours=True)], xlabel="x", ylabel="y", title="t", legend=("a",))
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    assert len(png) < 200_000 and (pixels[:, -1] == 255).all()
    teal = (abs(pixels - np.array([0x0F, 0x76, 0x6E])).sum(axis=2) < 30).sum()
    assert teal > 50


def test_large_points_are_drawn_whole(monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "_name", lambda figure, axes, dots: drawn.append((figure, axes)))
    dots = [Dot("slow", 51.4, 17.0, 36_000.0), Dot("fast", 35.0, 20.0, 400.0, ours=True)]
    scatter(dots, xlabel="x", ylabel="y", title="t")
    ((figure, axes),) = drawn
    inside = axes.get_window_extent()
    for dot in dots:
        x, y = axes.transData.transform((dot.x, dot.y))
        radius = math.sqrt(pictures._AREA * dot.seconds) / 2 * figure.dpi / 72
        assert inside.x0 <= x - radius and x + radius <= inside.x1, dot.name
        assert inside.y0 <= y - radius and y + radius <= inside.y1, dot.name
