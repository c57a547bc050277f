"""Tables and figures: drawn from the result files alone, and true to them."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from sparring.paper import Workspace, carry_out, render, results, specs
from sparring.paper.collect import Collected, collect
from sparring.paper.measure import mixture
from sparring.paper.notes import notes
from sparring.paper.specs import Losses, Mixture, Motivation, Row
from sparring.report.comparison import Ours, TableRow
from tests.paper.tiny import COURSE, FAT, TABLE, planned


def test_a_table_in_markdown(measured, tmp_path):
    collected = collect(TABLE, measured / "results")
    collected = replace(collected, home=tmp_path / "elsewhere")
    ((path, _),) = render.draw(collected).items()
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "elsewhere" / "table.md"
    attacks = results.read(planned(TABLE, measured)[1].path)["found"]["attacks"]
    fat = next(line for line in text.splitlines() if line.startswith("| FAT "))
    for name in ("natural", "pgd10"):
        assert f"{100 * attacks[name]['accuracy']:.2f}" in fat
    assert "|  | paper, M | 89.34 ± 0.221 | 46.13 ± 0.409 |  |" in text
    assert "sparring reproduce table-tiny --draw" in text


def test_a_table_on_the_page_has_our_numbers_the_papers_and_both_trade_offs(measured):
    shown = render.exhibit(collect(TABLE, measured / "results"))
    assert [row.label for row in shown.rows] == ["Madry", "FAT"] and list(shown.columns) == list(TABLE.columns)
    assert (
        len(shown.drawings) == 2 and "the paper's" in shown.drawings[1].caption and "89.3" in shown.drawings[1].caption
    )


def test_trade_offs_are_drawn_against_autoattack_where_it_was_measured():
    def row(label, natural, **robust):
        cells = {"Natural": natural, **{name.replace("_", "-"): value for name, value in robust.items()}}
        return TableRow(label, "", {name: Ours((value,), 100) for name, value in cells.items()})

    some = [row("Madry", 0.8, PGD_20=0.5, AutoAttack=0.45), row("FAT", 0.9, PGD_20=0.52, AutoAttack=0.4)]
    first, second = render._tradeoffs("t", [*some, row("CAT", 0.7, PGD_20=0.3)])
    assert first.caption.startswith("Natural and AutoAttack accuracy, ours: Madry 80.0 and 45.0; FAT 90.0 and 40.0.")
    assert second.caption.startswith("Natural and PGD-20 accuracy, ours: Madry 80.0 and 50.0;") and "CAT" in second.svg
    assert 'id="t-ours-autoattack-' in first.svg and 'id="t-ours-pgd-20-' in second.svg


def test_columns_without_numbers_are_left_out(tmp_path):
    item = specs.find("table1")
    assert list(render.exhibit(collect(item, tmp_path)).columns) == [c for c in item.columns if c != "AutoAttack"]


def points(measured, tmp_path):
    """A small fig-tau: two networks and three taus; the second network has two seeds."""
    rows = tuple(
        Row(
            f"{net}-tau{tau}", net, TABLE.rows[1].measure, {"lite": replace(FAT, weight_decay=weight)}, group=net, x=tau
        )
        for net, weight in (("one", 1e-4), ("two", 1e-3))
        for tau in (0, 1, 5)
    )
    item = replace(
        TABLE, name="fig-lines", kind="lines", rows=rows, xlabel="tau", columns={"Natural": "natural"}, together=True
    )
    for row in rows:
        for seed in (0, 1) if row.label == "two" else (0,):
            (wanted,) = planned(item, tmp_path, rows=(row.name,), seeds=(seed,))
            accuracy = {"accuracy": (10 * (row.label == "two") + row.x + seed) / 100, "n": 9}
            source = results.read(planned(TABLE, measured)[1].path)
            found = {"found": {"attacks": {"natural": accuracy}}, "row": row.name, "seed": seed}
            results.write(wanted.path, {**source, **wanted.declared, **found})
    return item


def test_a_line_figure(measured, tmp_path):
    item = points(measured, tmp_path)
    collected = collect(item, tmp_path / "results")
    series, spread = render._by_line(collected, item.rows, "Natural")
    assert series == {"one": ([0, 1, 5], [0, 1, 5]), "two": ([0, 1, 5], pytest.approx([10.5, 11.5, 15.5]))}
    assert spread == {"two": pytest.approx([0.7071] * 3, abs=1e-3)}
    ((path, caption),) = render.draw(collected).items()  # both networks in one picture
    assert path.name == "fig-lines.png" and "1 seed; Tiny CNN, 2 epochs, 2 seeds" in caption
    check_picture(path.read_bytes())
    shown = render.exhibit(collected)
    (drawing,) = shown.drawings
    band = "The band around two is ± the standard deviation over seeds, at most 0.7 points."
    assert "two 10.5 at 0, 15.5 at 5" in drawing.caption
    assert band in drawing.caption and band in re.search('aria-label="(.*?)"', drawing.svg)[1]
    assert drawing.svg.count("fill-opacity: 0.16") == 1


def test_every_group_has_its_own_picture(measured, tmp_path):
    item = points(measured, tmp_path)
    rows = tuple(replace(row, group=f"{row.label} (App. B)", label=f"line {row.x > 0}") for row in item.rows)
    item = replace(item, rows=rows, together=False)
    found = render.draw(collect(item, tmp_path / "results"))
    assert sorted(path.name for path in found) == ["one.png", "two.png"]


def test_a_single_point_is_reported_and_not_drawn(measured, tmp_path):
    item = points(measured, tmp_path)
    rows = tuple(replace(row, group=row.label) for row in item.rows if row.label == "two" or row.x == 5)
    collected = collect(replace(item, rows=rows, together=False), tmp_path / "results")
    assert [path.name for path in render.draw(collected)] == ["two.png"]
    assert {drawing.heading for drawing in render.exhibit(collected).drawings} == {"two"}
    alone = "A single point, not drawn: one, one, tau 5: 5.00 Natural."
    assert [note for note in notes(collected) if "not drawn" in note] == [alone]


def test_a_course_is_drawn_from_its_history(measured, tmp_path):
    collected = collect(COURSE, measured / "results")
    history = results.read(planned(COURSE, measured)[0].path)["history"]
    assert render._courses(collected) == {"FAT, Tiny CNN": {"tau 2": ([1.0, 2.0], history["backprops"])}}
    (path,) = render.draw(replace(collected, home=tmp_path))
    check_picture(path.read_bytes())


KINDS = ("foreign", "amidst", "purity")
ILLUSTRATIONS = {
    "motivation": (Motivation(points=8, updates=20, steps=2, shown=(0, 2), neighbours=3), None),
    "loss": (Losses(images=20, eps=0.3, step_size=0.1, steps=2), FAT),
    "mixture": (Mixture(("3", "8"), (2, 4), 8, eps=0.3, step_size=0.1, steps=2, neighbours=3), FAT),
}


@pytest.mark.parametrize("kind", ILLUSTRATIONS)
def test_the_illustrations(kind, measured, tmp_path):
    measure, config = ILLUSTRATIONS[kind]
    item = replace(COURSE, name="fig-x", kind=kind, rows=(Row("x", "label", measure, {"lite": config}),))
    jobs = [
        replace(job, folder=planned(COURSE, measured)[0].folder if config else None)  # an existing run
        for job in planned(item, tmp_path)
    ]
    carry_out(jobs, Workspace(torch.device("cpu")))
    assert jobs[0].path.stat().st_size < 200_000
    collected = collect(item, tmp_path / "results")
    found = render.draw(collected)
    assert len(found) == (2 if kind == "mixture" else 1)
    for path, caption in found.items():
        check_picture(path.read_bytes())
        assert "%" in caption or "bits" in caption or "t-SNE" in caption
        assert "seed 0" in caption.lower()
    assert len(set(found.values())) == len(found)  # no two captions are equal
    shown = render.exhibit(collected)
    assert [picture.caption for picture in shown.pictures] == list(found.values())
    for picture in shown.pictures:
        check_picture(picture.narrow)
        wide, narrow = (Image.open(io.BytesIO(png)).width for png in (picture.png, picture.narrow))
        assert narrow < 500 and narrow <= wide  # readable on a phone
    assert "onfirmed" in shown.findings[0]


def test_an_outlier_costs_the_other_points_no_precision():
    sets = [np.random.default_rng(seed).random((100, 2)) for seed in range(3)]
    sets[1][7] = 1e4, -1e4
    split = mixture._split(np.concatenate(sets))
    near = np.concatenate([split["natural"], split["friendly"]])
    assert (np.ptp(near, axis=0) > 90).all() and (abs(near) < 110).all() and split["pgd"][7][0] > 1e5
    flat = np.random.default_rng(0).random((90, 2)) * (1000.0, 0.1)  # long and narrow
    assert len({y for points in mixture._split(flat).values() for _, y in points}) > 80
    one = np.zeros((30, 2))
    assert not np.any(list(mixture._split(one).values()))


def test_captions_count_the_points_at_the_edge(tmp_path):
    what = replace(ILLUSTRATIONS["mixture"][0], layers=(2,))
    points = np.random.default_rng(0).random((60, 2))
    found = {
        "n": 60,
        "labels": [0, 1] * 30,
        "mixing": {"2": dict.fromkeys(mixture.SETS, dict.fromkeys(KINDS, 0.5))},
        "points": {"2": {method: dict.fromkeys(mixture.SETS, points) for method in ("pca", "tsne")}},
    }
    item = replace(COURSE, name="fig-x", kind="mixture", rows=(Row("x", "label", what, {"lite": FAT}),))
    here = {"device": "CPU", "torch": "2"}
    result = {"seed": 0, "config": {"epochs": 2}, "found": found, "environment": here, "trained_on": [here]}
    collected = Collected(item, tmp_path, {("x", "lite"): [result]}, [], 0)
    captions = [picture.caption for picture in render.pictures(collected).values()]
    assert all(text.startswith("label: ") and "edge" not in text for text in captions) and len(captions) == 2
    far = points.copy()
    far[3] = 90.0, 0.5
    found["points"]["2"]["pca"] = {"natural": points, "pgd": far, "friendly": points}
    pca, tsne = render.pictures(collected).values()
    assert pca.caption.endswith(" Of the 180 points, 1 outlier is drawn at the edge.")
    assert "edge" not in tsne.caption


@pytest.mark.parametrize("item", specs.ITEMS.values(), ids=lambda item: item.name)
def test_an_item_without_results_has_no_drawings(item, tmp_path):
    collected = collect(item, tmp_path)
    files = render.draw(collected)
    assert [path.suffix for path in files] == ([".md"] if item.kind in ("table", "benchmark") else [])
    if item.kind in ("table", "benchmark"):
        assert next(iter(files)).read_text(encoding="utf-8").count("not yet measured") == len(item.rows)
    shown = render.exhibit(collected)
    assert not shown.drawings and not shown.pictures


def check_picture(png: bytes) -> None:
    """A PNG of a plausible size, on white, not empty, and below 200 kB."""
    assert len(png) < 200_000
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
    assert min(pixels.shape) > 150 and pixels[0, -1] == 255 and 0.003 < (pixels < 200).mean() < 0.5


def test_a_single_point_is_listed_once():
    assert render._ends("T", {"a": ([0.03], [85.18]), "b": ([0.0, 5.0], [1.0, 1.0])}) == (
        "T: a 85.2 at 0.03; b 1.0 at 0, 1.0 at 5."
    )


def test_a_tau_has_the_same_style_in_every_figure():
    radii, courses, taus = (render._names(specs.find(name)) for name in ("fig-eps", "fig-bps", "fig-tau"))
    assert radii[:6] == ["tau 0", "tau 1", "tau 2", "tau 3", "Madry", "TRADES"]
    assert courses == ["tau 0", "tau 1", "tau 2", "tau 3", "Madry (tau = K)", "TRADES (tau = K)"]
    assert taus == ["Small CNN", "ResNet-18"]
