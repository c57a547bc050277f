"""SVG drawings: self-contained, in the page's colours, and without a trace in matplotlib's settings."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import matplotlib
import pytest

from sparring.report import charts

SERIES = {"Standard": ([1, 2, 3], [90.0, 97.0, 99.0]), "Madry": ([1, 2, 3], [40.0, 80.0, 95.0])}
POINTS = {"Standard": (99.0, 0.0), "Madry": (95.0, 57.0), "FAT": (98.0, 56.0)}


def draw_both(name="one", alt="what it shows"):
    return [
        charts.curves(SERIES, name=name, title="Natural accuracy (%)", alt=alt, most=100.0),
        charts.tradeoff(POINTS, name=name, xlabel="natural", ylabel="PGD-20", alt=alt),
    ]


@pytest.mark.parametrize("svg", draw_both())
def test_a_drawing_is_one_svg_element_without_external_references(svg):
    root = ET.fromstring(svg)
    assert root.tag == "svg" and root.get("role") == "img" and root.get("aria-label") == "what it shows"
    assert "http" not in svg and "<style" not in svg and "<metadata" not in svg and "<text" not in svg
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and all(name.startswith("one-") for name in ids)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) <= set(ids)


@pytest.mark.parametrize("svg", draw_both())
def test_colours_are_the_pages(svg):
    assert "currentColor" in svg and "var(--series-1" in svg and "var(--series-2" in svg
    assert charts.INK not in svg
    left = re.sub(r"var\([^)]*\)", "", svg)
    assert set(re.findall(r"#[0-9a-f]{6}\b", left)) <= {"#ffffff"}  # every other colour is the page's


def test_series_differ_without_colour():
    styles = [charts.line_style(index) for index in range(30)]
    assert len({(str(style["linestyle"]), style["marker"]) for style in styles}) == 30


@pytest.fixture
def drawn(monkeypatch):
    """Collects the axes of every drawing."""
    found = []
    monkeypatch.setattr(charts, "_svg", lambda figure, name, alt: found.append(figure.axes[0]) or "")
    return found


def test_the_spread_over_seeds_is_a_band_with_edges_in_its_lines_style(drawn):
    charts.curves(SERIES, name="n", title="t", alt="a", spread={"Madry": [1.0, 2.0, 3.0]}, most=100.0)
    (axes,) = drawn
    (band,) = axes.collections
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1, 39), (1, 41), (2, 78), (2, 82), (3, 92), (3, 98)}
    assert 0 < band.get_alpha() < 0.3  # lines below it show through
    standard, madry, *edges = axes.lines
    assert [list(edge.get_ydata()) for edge in edges] == [[39, 78, 92], [41, 82, 98]]
    assert {edge.get_linestyle() for edge in edges} == {madry.get_linestyle()} != {standard.get_linestyle()}
    low, high = axes.get_ylim()
    assert low < 39 and high > 99


def test_the_spread_of_a_single_point_is_a_bar(drawn):
    charts.curves({"a": ([1], [50.0])}, name="n", title="t", alt="a", spread={"a": [2.0]}, most=100.0)
    *_, bar = drawn[0].collections
    assert bar.get_segments()[0].tolist() == [[1, 48], [1, 52]]


def test_a_band_has_the_colour_of_its_line_on_the_page():
    svg = charts.curves(SERIES, name="n", title="t", alt="a", spread={"Madry": [1.0, 2.0, 3.0]}, most=100.0)
    assert re.search(r"fill: var\(--series-2, #[0-9a-f]{6}\); fill-opacity: 0\.\d+", svg)


@pytest.mark.parametrize("kind", ["curves", "tradeoff"])
def test_a_series_has_the_same_style_in_all_related_drawings(drawn, kind):
    for names in (["a", "b", "c"], ["c"]):
        if kind == "curves":
            lines = {name: ([1, 2], [1.0, 2.0]) for name in names}
            charts.curves(lines, name="n", title="t", alt="a", all_names="abc")
        else:
            points = {name: (9.0 * ord(name), 9.0 * ord(name)) for name in names}
            charts.tradeoff(points, name="n", xlabel="x", ylabel="y", alt="a", all_names="abc")
    first, second = ([(line.get_color(), line.get_marker()) for line in axes.lines] for axes in drawn)
    assert second == first[2:] and len(set(first)) == 3


def test_a_line_that_ends_early_is_named_by_a_marker_and_not_by_a_leader_line(drawn):
    charts.curves(
        {"long": ([1, 2, 3], [1.0, 2.0, 3.0]), "short": ([1, 2], [1.0, 2.0])}, name="n", title="t", alt="a", most=9.0
    )
    (axes,) = drawn
    leaders = {text.get_text(): text.arrow_patch is not None for text in axes.texts}
    assert leaders == {"long": True, "short": False}
    _, short, mark = axes.lines
    assert (mark.get_marker(), mark.get_color()) == (short.get_marker(), short.get_color())
    height = next(text.xyann[1] for text in axes.texts if text.get_text() == "short")
    assert mark.get_transform() == axes.transAxes and list(mark.get_ydata()) == [height] and mark.get_xdata()[0] > 1


@pytest.mark.parametrize("kind", ["curves", "tradeoff"])
def test_long_names_stay_different_in_a_drawing(drawn, kind):
    names = [f"digits-tiny_cnn-fat-5-seed{seed}-1a2b3c4d5e" for seed in range(3)]
    if kind == "curves":
        charts.curves({name: ([1, 2], [1.0, 2.0]) for name in names}, name="n", title="t", alt="a")
    else:
        points = {name: (9.0 * i, 9.0 * i) for i, name in enumerate(names)}
        charts.tradeoff(points, name="n", xlabel="x", ylabel="y", alt="a")
    shown = {text.get_text() for text in drawn[0].texts} - {"better"}
    assert len(shown) == 3 and all(len(name) <= 25 for name in shown)


CORNERS = {"low": (80.0, 40.0), "right": (90.0, 40.0), "top": (80.0, 60.0), "FAT-MART 8/255": (90.0, 60.0)}


@pytest.mark.parametrize("points", [POINTS, CORNERS, {f"a run with a long name, {i}": (i, i) for i in range(12)}])
@pytest.mark.parametrize(
    "title", ["Accuracy under PGD-20 on test images (%)", "Trade-off, the paper's: PGD-20 accuracy (%)"]
)
def test_the_word_better_covers_no_point_and_no_name(drawn, points, title):
    charts.tradeoff(points, name="n", xlabel="natural accuracy (%)", ylabel=title, alt="a")
    (axes,) = drawn
    axes.figure.draw_without_rendering()
    texts = [*axes.texts, *axes.figure.texts]
    (better,) = [text.get_window_extent() for text in texts if "better" in text.get_text()]
    others = [text for text in texts if "better" not in text.get_text()] + [*axes.lines, axes.xaxis.label]
    assert len(others) == 2 * len(points) + 2 and not any(better.overlaps(one.get_window_extent()) for one in others)
    assert better.x1 <= axes.figure.bbox.x1 and better.y1 <= axes.figure.bbox.y1


@pytest.mark.parametrize("top", [10.0, 20.0, 100.0])
def test_tick_labels_are_inside_the_drawing(drawn, top):
    charts.curves({"a": ([1, 2], [0.0, top])}, name="n", title="t", alt="a")
    (axes,) = drawn
    axes.figure.draw_without_rendering()
    labels = [label for label in axes.get_yticklabels() if label.get_text()]
    assert labels and all(label.get_window_extent().x0 >= 0 for label in labels)


def test_equal_drawings_have_equal_bytes():
    assert draw_both() == draw_both()


def test_alt_text_and_names_are_escaped():
    evil = '"><script>alert(1)</script>'
    svg = charts.curves({evil: ([1], [2.0]), "$x_$": ([1], [3.0])}, name="n", title=evil, alt=evil)
    assert "<script" not in svg
    assert ET.fromstring(svg).get("aria-label") == evil


def test_no_figure_stays_open_and_settings_are_restored():
    with matplotlib.rc_context({"font.size": 31.0, "svg.fonttype": "none"}):
        settings = dict(matplotlib.rcParams)
        one = draw_both()
        assert dict(matplotlib.rcParams) == settings
    assert one == draw_both()  # the user's own settings have no effect
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []


def test_names_keep_their_order_and_a_least_distance():
    placed = charts._spread({"a": 0.98, "b": 0.99, "c": 1.0, "d": 0.1})
    heights = [placed[label] for label in "dabc"]
    assert placed["d"] == pytest.approx(0.1) and max(heights) <= 1.0
    assert all(above - below > charts._GAP - 1e-9 for below, above in pairwise(heights))


def test_close_points_are_named_beside_the_axes():
    assert not charts._crowded(list(POINTS.values())[:2])
    assert charts._crowded([(95.0, 57.0), (95.4, 56.0), (99.0, 0.0)])
    assert charts.tradeoff({"a": (95.0, 57.0), "b": (95.0, 57.0)}, name="n", xlabel="x", ylabel="y", alt="z")
