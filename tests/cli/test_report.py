"""`sparring report`: runs and results on one page, looked at in a real browser where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sparring.cli.evaluate import run as evaluate
from sparring.recipes import paper
from tests.cli.conftest import QUICK
from tests.report.test_page import CHROMIUM, Reader
from tests.reproduce.tiny import COURSE, TABLE

ITEMS = {item.name: item for item in (TABLE, COURSE, paper.find("fig-motivation"))}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(paper, "ITEMS", ITEMS)


@pytest.fixture(scope="session")
def evaluated(finished, tmp_path_factory):
    """The run with an evaluation in it."""
    folder = tmp_path_factory.mktemp("evaluated") / "fat-run"
    shutil.copytree(finished, folder)
    words = ["--protocol", "mart", "--eps", "0.3", "--limit", "40", "--no-doubts", "--device", "cpu"]
    assert evaluate([str(folder), *words]) == 0
    return folder


def page(path="report.html"):
    text = Path(path).read_text(encoding="utf-8")
    return text, Reader(text)


def test_results_of_the_paper(sparring, measured):
    said = sparring("report", measured / "results")
    assert said.code == 0 and said.out == "wrote report.html\n", said
    text, reader = page()
    words = reader.text.replace("\u00a0", " ")
    assert "Table 0 of the paper" in words and "89.34 ± 0.22" in words and "FAT is more accurate." in words
    assert "Figure 0 of the paper" in words and "Trade-off" not in words  # drawn: its words are paths, its alt says it
    drawn = [attributes["aria-label"] for tag, attributes in reader.tags if tag == "svg"]
    assert len(drawn) == 3 and any("Trade-off, the paper's" in label for label in drawn)
    assert len(reader.ids) == len(set(reader.ids))
    for tag, attributes in reader.tags:
        if tag == "a" and attributes["href"].startswith("#"):
            assert attributes["href"][1:] in reader.ids
    assert "fig-motivation" not in text  # nothing of it is measured


def test_one_item(sparring, measured):
    assert sparring("report", measured / "results" / "fig-tiny", "--out", "one.html", "--title", "Mine").code == 0
    text, _ = page("one.html")
    assert "Figure 0" in text and "Table 0" not in text and "<h1>Mine</h1>" in text


def test_runs(sparring, evaluated, finished):
    assert sparring("report", finished, evaluated, "--walks", 1).code == 0
    text, reader = page()
    assert "2 runs compared" in text and "fat-run" in text
    for column in ("Natural", "FGSM", "PGD-20", "C&amp;W", "Worst case", "Natural (validation)"):
        assert f'data-column="{column}"' in text, column
    assert "fat on digits, tiny_cnn, 2 epochs, seed 0" in reader.text
    assert text.count('<figure class="strip"') == 1 and "PGD-2" in text
    assert sparring("report", evaluated, "--walks", 0).code == 0
    assert "strip" not in page()[0].split("</style>")[1]


def test_data_that_are_gone_cost_only_the_walks(sparring, evaluated, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(evaluated, folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"digits"', '"npz:gone.npz"'))
    assert sparring("report", folder).code == 0
    assert "No attack is walked: no such file: gone.npz" in page()[1].text


def test_wrong_words(sparring, tmp_path):
    sparring("report", "runs/nope").mends("there is no runs/nope")
    sparring("report").mends("there is no results", "sparring reproduce")
    (tmp_path / "results").mkdir()
    sparring("report").mends("nothing to report in results", "sparring reproduce fig-motivation")
    (tmp_path / "odd").mkdir()
    sparring("report", "odd").mends("neither a run nor results")
    sparring("report", "results", "--walks", -1).mends("--walks")
    sparring("report", "results", "--out", tmp_path).mends("is a folder", "report.html")


def test_a_run_without_an_epoch(sparring):
    assert sparring("train", *QUICK, "--out", "run").code == 0
    Path("run/metrics.jsonl").write_text("")
    sparring("report", "run").mends("no finished epoch", "--resume")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install it with: apt-get install -y chromium")
def test_renders_in_a_browser_on_a_desk_and_on_a_phone(sparring, measured, evaluated, tmp_path):
    assert sparring("reproduce", "fig-motivation", "--results", tmp_path / "results").code == 0
    assert sparring("report", measured / "results", tmp_path / "results" / "fig-motivation", evaluated).code == 0
    # Both in one picture: headless Chromium's own window cannot be as narrow as a phone.
    frames = "".join(
        f'<iframe src="report.html" style="width:{width}px;height:3000px;border:0;float:left"></iframe>'
        for width in (1200, 390)
    )
    Path("frames.html").write_text(f'<!doctype html><title>frames</title><body style="margin:0">{frames}')
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--window-size=1590,3000",
            "--screenshot=page.png", Path("frames.html").absolute().as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    pixels = np.asarray(Image.open("page.png").convert("L"))
    for page in (pixels[:, :1200], pixels[:, 1200:1590]):
        assert 0.01 < (page < 120).mean() < 0.5
        assert (page[:, -12:] < 120).mean() < 0.02  # nothing runs out of the page at its right edge
