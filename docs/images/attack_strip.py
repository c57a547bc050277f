"""Draw docs/images/attack-strip.png: three digits under PGD-10, step by step, and where PGD-10-0 stops.

    python docs/images/attack_strip.py

Trains the recipe fat-digits into a temporary folder (about 15 s on a CPU). The attack starts at the image, so
`pgd(steps=k)` is the k-th iterate of `pgd(steps=10)`. The three images are those that first cross the boundary at the
steps of CROSSINGS, one class each, and on which plain PGD ends with the highest confidence.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor, nn

import sparring
from sparring import data
from sparring.attacks import friendly_pgd, pgd

EPS, STEPS = 0.3, 10  # the radius of the recipe
STEP_SIZE = EPS / STEPS
CROSSINGS = (3, 5, 7)
OUT = Path(__file__).with_name("attack-strip.png")

INK, MUTED = "#1f2937", "#6b7280"
RIGHT, WRONG, STOP = "#2563a8", "#b4342d", "#d97706"
RIGHT_BAND, WRONG_BAND = "#e8f0f9", "#fbeae8"
PIXELS, DPI = (1600, 704), 200  # shown at half that width


@dataclass(frozen=True)
class Strip:
    """One image under attack: a frame for every step from 0 to STEPS."""

    frames: Tensor  # (STEPS + 1, height, width), pixels in [0, 1]
    predicted: list[int]
    confidence: list[float]
    label: int
    stop: int  # the step at which PGD-10-0 stops


def trained() -> nn.Module:
    """The model of fat-digits, seed 0."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        command = [sys.executable, "-m", "sparring", "train", "fat-digits", "--out", run, "--device", "cpu"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return sparring.load_model(run)


def strips(model: nn.Module) -> list[Strip]:
    """One strip for each of CROSSINGS."""
    test = data.load("digits").test
    x, y = test.x.float() / 255, test.y
    settings = {"eps": EPS, "step_size": STEP_SIZE, "start": None}
    iterates = torch.stack([x, *(pgd(model, x, y, steps=k, **settings) for k in range(1, STEPS + 1))])
    found = friendly_pgd(model, x, y, steps=STEPS, tau=0, **settings)
    with torch.no_grad():
        confidence, predicted = torch.stack([model(points).softmax(dim=1) for points in iterates]).max(dim=2)
    wrong = predicted != y
    every = torch.arange(len(x))
    # PGD-10-0 returns the iterate of plain PGD at which the prediction is first wrong.
    assert torch.equal(found.x_adv, iterates[found.backprops, every])
    chosen: list[Strip] = []
    for crossing in CROSSINGS:
        stays = (found.backprops == crossing) & wrong[crossing:].all(dim=0)
        for strip in chosen:
            stays &= y != strip.label
        best = int(torch.where(stays, confidence[-1], -1.0).argmax())
        assert stays[best], f"no test image crosses at step {crossing} and stays wrong"
        frames = iterates[:, best, 0]
        chosen.append(Strip(frames, predicted[:, best].tolist(), confidence[:, best].tolist(), int(y[best]), crossing))
    return chosen


def draw(chosen: list[Strip]) -> None:
    """Write the picture."""
    width, height = (pixels / DPI for pixels in PIXELS)
    plt.rcParams |= {"font.family": "DejaVu Sans", "font.size": 7.2}
    figure = plt.figure(figsize=(width, height), dpi=DPI, facecolor="white")
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set_xlim(0, width)
    canvas.set_ylim(height, 0)
    canvas.axis("off")

    left, gap, frame = 0.5, 0.085, 0.575
    pitch, top, row = frame + gap, 0.60, 0.985
    x_of = [left + step * pitch for step in range(STEPS + 1)]
    canvas.text(0.06, 0.40, "step", color=MUTED, va="center")
    for step, x in enumerate(x_of):
        canvas.text(x + frame / 2, 0.40, str(step), color=MUTED, ha="center", va="center")
    for number, strip in enumerate(chosen):
        _row(canvas, strip, x_of, frame=frame, gap=gap, y=top + number * row)
    _legend(canvas, y=0.14, left=left)
    figure.savefig(OUT, dpi=DPI)


def _row(canvas: Axes, strip: Strip, x_of: list[float], *, frame: float, gap: float, y: float) -> None:
    band = {"boxstyle": "round,pad=0,rounding_size=0.05", "linewidth": 0}
    crossing = x_of[strip.stop] - gap / 2
    ends = (x_of[0] - gap / 2, x_of[-1] + frame + gap / 2)
    depth = frame + 0.29
    for begin, end, colour in ((ends[0], crossing, RIGHT_BAND), (crossing, ends[1], WRONG_BAND)):
        canvas.add_patch(FancyBboxPatch((begin, y - 0.05), end - begin, depth, facecolor=colour, **band))
    canvas.plot([crossing, crossing], [y - 0.05, y - 0.05 + depth], color=STOP, linewidth=1.4, solid_capstyle="butt")
    canvas.text(0.06, y + 0.20, "label", color=MUTED, va="center")
    canvas.text(0.06, y + 0.40, str(strip.label), color=INK, va="center", fontsize=13, fontweight="bold")
    for step, x in enumerate(x_of):
        pixels = strip.frames[step].numpy()
        after = step > strip.stop
        canvas.imshow(
            pixels, cmap="gray_r", vmin=0, vmax=1, extent=(x, x + frame, y + frame, y), interpolation="nearest",
            alpha=0.7 if after else 1.0, zorder=2,
        )  # fmt: skip
        stop = step == strip.stop
        edge, weight = (STOP, 2.2) if stop else ("#9ca3af", 0.5)
        canvas.add_patch(Rectangle((x, y), frame, frame, fill=False, edgecolor=edge, linewidth=weight, zorder=3))
        right = strip.predicted[step] == strip.label
        colour = RIGHT if right else WRONG
        canvas.text(
            x + frame / 2, y + frame + 0.125, f"{strip.predicted[step]}   {100 * strip.confidence[step]:.0f} %",
            ha="center", va="center", color=colour, fontweight="bold" if stop else "normal", alpha=0.8 if after else 1,
        )  # fmt: skip
    canvas.set_aspect("auto")


def _legend(canvas: Axes, *, y: float, left: float) -> None:
    entries = (
        (RIGHT_BAND, RIGHT, "the model is right", 0.0),
        (None, STOP, "PGD-10-0 stops: first wrong prediction, FAT trains here", 1.42),
        (WRONG_BAND, WRONG, "PGD-10 goes on, deeper into the wrong class", 4.60),
    )
    for face, colour, text, offset in entries:
        x = left - 0.04 + offset
        outline = {"facecolor": face or "white", "edgecolor": STOP if face is None else face}
        canvas.add_patch(Rectangle((x, y - 0.07), 0.14, 0.14, linewidth=2.0 if face is None else 0.5, **outline))
        canvas.text(x + 0.21, y, text, color=colour, va="center_baseline")


if __name__ == "__main__":
    draw(strips(trained()))
    print(OUT)
