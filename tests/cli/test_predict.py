"""`sparring predict`: image files in, class names and probabilities out."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import sparring as library
from sparring import data

from .conftest import QUICK, write_images


@pytest.fixture
def images(tmp_path):
    """Three digits as files: as they are, large and coloured, and turned by its EXIF tag."""
    x = data.load("digits").test.x[:3, 0].numpy()
    Image.fromarray(x[0]).save(tmp_path / "plain.png")
    Image.fromarray(x[1]).resize((64, 64), Image.Resampling.NEAREST).convert("RGB").save(tmp_path / "large.bmp")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(x[2]).copy()).save(tmp_path / "turned.png", exif=exif)
    return x


def test_predictions_are_those_of_the_model(sparring, images):
    said = sparring("predict", "fat-digits", "plain.png", "large.bmp", "turned.png", "--json", "--top", "10")
    assert said.code == 0 and said.err == ""
    found = json.loads(said.out)["images"]
    with torch.no_grad():
        expected = library.load_model("fat-digits")(torch.from_numpy(images)[:, None].float() / 255).softmax(dim=1)
    for row, each in enumerate(found):
        assert each["class"] == str(int(expected[row].argmax()))
        given = {top["class"]: top["probability"] for top in each["top"]}
        # The large one is scaled down, which gives nearly the same pixels; the turned one is exact.
        tolerance = 0.2 if row == 1 else 1e-5
        assert all(abs(given[str(label)] - float(expected[row, label])) < tolerance for label in range(10))


def test_images_are_read_as_in_training_on_a_folder(sparring, tmp_path):
    top = write_images(tmp_path / "photos", 60)
    for path in top.rglob("*.png"):
        with Image.open(path) as image:
            image.resize((13, 11)).convert("RGB").save(path)
    spec = f"folder:{top}?size=8"
    assert sparring("train", *QUICK, "--data", spec, "--epochs", 1, "--validation", 10, "--out", "run").code == 0
    trained_on = data.load(spec)
    files = sorted((top / "digit 3").glob("*.png"))
    found = json.loads(sparring("predict", "run", *files, "--json", "--top", "1").out)["images"]
    model = library.load_model("run")
    pixels = data.read_images(files, size=(8, 8), channels=3)
    known = {image.numpy().tobytes() for split in (trained_on.train, trained_on.test) for image in split.x}
    assert all(image.numpy().tobytes() in known for image in pixels)
    assert [each["class"] for each in found] == [model.classes[i] for i in model(pixels.float() / 255).argmax(1)]


def test_the_table_and_the_attack(sparring, images):
    said = sparring("predict", "fat-digits", "plain.png", "--eps", "0.3")
    assert said.code == 0 and "under attack" in said.out and "PGD-20 within eps 0.3 changed" in said.out
    assert sparring("predict", "fat-digits", "plain.png", "--eps", "0.3").out == said.out  # the same random start
    strong = json.loads(sparring("predict", "fat-digits", "plain.png", "--eps", "1", "--json").out)
    assert strong["images"][0]["changed"] and strong["attack"]["eps"] == 1
    weak = json.loads(sparring("predict", "fat-digits", "plain.png", "--eps", "1e-4", "--json").out)
    assert weak["images"][0]["changed"] is False and weak["images"][0]["attacked"] == weak["images"][0]["class"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_path_is_printed_whole(sparring, images, tmp_path, monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "80")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    folder = tmp_path / "a-folder-with-a-rather-long-name" / "and-another-one-below-it-with-more-to-say"
    folder.mkdir(parents=True)
    file = (tmp_path / "plain.png").rename(folder / "plain.png").relative_to(tmp_path)
    out = sparring("predict", "fat-digits", file, "--eps", "0.3").out
    if terminal:  # folded inside its column
        assert "".join(line[:28].strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()[1:4]) in str(file)
        assert "…" not in out
    else:
        assert str(file) in out


def test_every_kind_of_model(sparring, images, finished):
    assert sparring("export", finished, "--out", "weights").code == 0
    assert sparring("export", finished, "--format", "hub", "--out", "hub").code == 0
    said = [sparring("predict", model, "plain.png") for model in (finished, "weights/run-last.safetensors", "hub")]
    assert len({each.out for each in said}) == 1 and said[0].code == 0
    published = sparring("predict", "weights/run-last.pt", "plain.png")
    assert "records neither class names nor the size" in published.out
    assert "class names" not in sparring("predict", "weights/run-last.pt", "plain.png", "--data", "digits").out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["PATH is missing", "A run folder"]),
        (["fat-digits"], ["no image given"]),
        (["fat-digits", "plain.png", "text.png", "none.png"], ["2 files cannot be used", "text.png", "none.png"]),
        (["plain.png", "fat-digits"], ["plain.png is an image, not a checkpoint. The model comes first"]),
        (["large.bmp", "plain.png", "fat-digits"], ["large.bmp is an image", "sparring predict fat-digits digit.png"]),
        (["fat-digits", "plain.png", "--top", "0"], ["--top must be at least 1"]),
        (["fat-digits", "plain.png", "--eps", "8"], ["--eps must lie in (0, 1]", "8/255"]),
        (["fat-digit", "plain.png"], ["Did you mean 'fat-digits'?"]),
        (["fat-digits", "plain.png", "--data", "digits:3+5"], ["10 classes", "2 and 1"]),
    ],
)
def test_user_errors_are_one_line(sparring, images, tmp_path, words, says):
    (tmp_path / "text.png").write_text("hello")
    sparring("predict", *words).user_error(*says)
