"""PNG pictures: points at their coordinates, small files, equal bytes, matplotlib's settings unchanged."""

from __future__ import annotations

import io

import matplotlib
import numpy as np
import pytest
from PIL import Image

from sparring.report import panels
from sparring.report.panels import Lines, Plane

SERIES = {"a": ([0, 1, 2], [10.0, 20.0, 30.0]), "b": ([0, 1, 2], [30.0, 20.0, 10.0])}
CLOUD = np.random.default_rng(0).random((40, 2)).tolist()
LABELS = [0] * 20 + [1] * 20
DRAWN = {
    "grid": lambda: panels.grid(
        [Lines("one", SERIES, {"a": [1, 2, 3]}), Lines("two", SERIES)], xlabel="tau", title="T"
    ),
    "planes": lambda: panels.planes(
        [[Plane("p", CLOUD, LABELS, behind=CLOUD)]], ("x", "y"), title="T", row_names=["r"]
    ),
    "square": lambda: panels.planes(
        [[Plane("p", CLOUD, LABELS, probability=[[0.0, 0.2], [0.9, 1.0]])]], ("x", "y"), title="T"
    ),
    "losses": lambda: panels.losses({"n": CLOUD, "w": CLOUD}, title="T", names={"n": "natural", "w": "worst"}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_every_kind_of_picture_is_small_and_repeatable(name):
    settings = dict(matplotlib.rcParams)
    png = DRAWN[name]()
    assert dict(matplotlib.rcParams) == settings and DRAWN[name]() == png
    image = Image.open(io.BytesIO(png))
    pixels = np.asarray(image.convert("L"))
    assert image.format == "PNG" and len(png) < 100_000 and pixels[0, -1] == 255
    assert 0.003 < (pixels < 200).mean() < 0.5


def test_a_picture_grows_with_its_panels():
    sizes = [
        Image.open(io.BytesIO(panels.grid([Lines(str(i), SERIES) for i in range(n)], xlabel="eps", title="T"))).size
        for n in (1, 3, 6)
    ]
    assert sizes[0][0] < sizes[1][0] == sizes[2][0] and sizes[0][1] == sizes[1][1] < sizes[2][1]


def test_the_planes_of_a_row_share_their_axes():
    row = [Plane("a", [[0, 0], [1, 1]], [0, 1]), Plane("b", [[5, 9], [1, 1]], [0, 1])]
    low, high = panels._limits(row)
    assert low == pytest.approx([-0.25, -0.45]) and high == pytest.approx([5.25, 9.45])
    square = panels._limits([Plane("a", [[0.5, 0.5]], [0], probability=[[0, 1], [0, 1]])])
    assert [corner.tolist() for corner in square] == [[0, 0], [1, 1]]


def test_outliers_are_drawn_at_the_edge(monkeypatch):
    far = [*CLOUD * 5, [50.0, 0.5], [0.5, -70.0]]
    row = [Plane("near", CLOUD, LABELS), Plane("far", far, [*LABELS * 5, 0, 1], behind=far)]
    low, high = panels._limits(row)
    assert (low > -0.2).all() and (high < 1.2).all()
    assert panels.outside([row]) == 2 and panels.outside([row, row]) == 4
    shown = []
    monkeypatch.setattr(panels, "png", lambda figure: shown.extend(figure.axes) or b"")
    panels.planes([row], ("x", "y"), title="t")
    points = np.concatenate([line.get_xydata() for line in shown[1].lines])
    assert len(points) == 2 * len(far) and (points >= low).all() and (points <= high).all()
    assert sum(x == high[0] for x, _ in points) == sum(y == low[1] for _, y in points) == 2  # in front and behind
    assert not any(line.get_clip_on() for line in shown[1].lines)  # markers on the frame are not cut


def test_without_outliers_all_points_are_inside():
    assert panels.outside([[Plane("p", CLOUD, LABELS)]]) == 0
    nearly_one = [[0.0, 0.0]] * 200 + [[1.0, 5.0]]
    assert panels.outside([[Plane("p", nearly_one, [0] * 201)]]) == 0


def test_losses_show_every_point(monkeypatch):
    shown = []
    monkeypatch.setattr(panels, "png", lambda figure: shown.extend(figure.axes) or b"")
    far = [[0.1 * i - 5, 1.0] for i in range(1000)] + [[-400.0, 90.0], [700.0, 0.0]]
    panels.losses({"a": far, "b": far[:9]}, title="t", names={"a": "a", "b": "b"})
    for axes in shown:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        assert left < -400 and right > 700 and bottom < 0 and top > 90


def test_a_series_has_the_same_colour_in_all_related_pictures():
    colour = {"b": (180, 83, 9), "a": (107, 114, 128)}  # the second and the first series

    def found(rgb, **more):
        png = panels.grid([Lines("one", {"b": SERIES["b"]})], xlabel="tau", title="T", **more)
        return (np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) == rgb).all(axis=2).any()

    assert found(colour["b"], all_names=["a", "b"]) and not found(colour["a"], all_names=["a", "b"])
    assert found(colour["a"]) and not found(colour["b"])


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("name", ["tau {}", "FAT for TRADES with tau = K, {}"])
@pytest.mark.parametrize("wide", [1, 3])
def test_the_legend_fits_below_the_panels(monkeypatch, count, name, wide):
    figures = []
    monkeypatch.setattr(panels, "png", lambda figure: figures.append(figure) or b"")
    series = {name.format(i): ([0, 1], [10.0, 20.0 + i]) for i in range(count)}
    panels.grid([Lines("one", series)] * wide, xlabel="tau", title="T")
    (figure,) = figures
    figure.canvas.draw()
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y0 >= whole.y0
    assert all(axes.get_window_extent().height > 1.4 * figure.dpi for axes in figure.axes)
