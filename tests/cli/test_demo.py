"""`sparring demo`, shortened to one epoch."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal

import pytest
import torch
from markupsafe import escape

import sparring as library
from sparring.cli import demo
from sparring.report.content import Method
from sparring.report.gather import methods


def test_the_demo(sparring, tmp_path):
    """Table, page, JSON and models; the name of the folder is printed as it is, markup included."""
    name = "demo [v2][/v3]"
    said = sparring("demo", "--epochs", "1", "--seed", "1", "--out", name)
    assert said.code == 0 and said.err == ""
    for word in ("Standard", "Madry", "FAT", *demo.ATTACKS, "mean BPs", "seconds", f"The page: {name}/index.html"):
        assert word in said.out
    assert "Friendly training is" in said.out and f"load_model('{name}/fat')" in said.out
    page = (tmp_path / name / "index.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "<svg" in page and not re.findall(r'src="(?!data:)|<link[^>]* href="(?!data:)', page)  # self-contained
    written = json.loads((tmp_path / name / "demo.json").read_text())
    assert written["seed"] == 1 and written["n"] == 450 and set(written["methods"]) == {"Standard", "Madry", "FAT"}
    assert written["methods"]["Standard"]["backprops"] == 0 and written["methods"]["Madry"]["backprops"] == 10
    assert 0 < written["methods"]["FAT"]["backprops"] < 10
    assert library.load_model(tmp_path / name / "fat")(torch.rand(1, 1, 8, 8)).shape == (1, 10)
    # The page and the screen name the command that measures FAT again; it gives the same numbers in the same file.
    again = shlex.join(["sparring", "evaluate", f"{name}/fat", "--protocol", "mart", "--eps", "0.3"])
    assert "Protocol mart: steps of eps/10" in said.out and f"{again}\n" in said.out
    assert f"<code>{escape(again)}</code>" in page and "follow the protocol mart, with steps of eps/10" in page
    own = {column: written["methods"]["FAT"][column] for column in demo.ATTACKS}
    (row,) = methods(tmp_path / name / "fat")
    assert row.measured == "eps 0.3, 450 images of digits, protocol mart" and own.items() <= row.accuracies.items()
    assert sparring(*shlex.split(again)[1:], "--no-doubts").code == 0
    assert [path.name for path in (tmp_path / name / "fat" / "evaluation").glob("*.json")] == ["mart-eps0.3.json"]
    assert methods(tmp_path / name / "fat")[0].accuracies == row.accuracies
    # A report shows the demo's measurements, not validation accuracies.
    assert sparring("report", name, "--strips", "0").code == 0
    assert "(validation)" not in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("number", "trained_with"), [(None, 1), ("2", 2)])
def test_one_thread_unless_the_user_says_how_many(sparring, tmp_path, monkeypatch, number, trained_with):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if number:
        monkeypatch.setenv("OMP_NUM_THREADS", number)
    try:
        assert sparring("demo", "--epochs", "1").code == 0
        assert torch.get_num_threads() == 2  # as the caller had it
    finally:
        torch.set_num_threads(before)
    folder = tmp_path / "runs" / "demo"
    (start,) = json.loads((folder / "fat" / "environment.json").read_text())
    assert start["threads"] == json.loads((folder / "demo.json").read_text())["threads"] == trained_with


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
        (["--epochs", "few"], "--epochs: 'few' is not a whole number"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--out", "file"], "cannot make the folder file/standard"),
        (["--eps", "0.1"], "--eps"),
        (["--out", "site"], "site holds something else (index.html)"),
        (["--out", "images"], "images holds something else (cat)"),
    ],
)
def test_user_errors(sparring, tmp_path, words, parts):
    (tmp_path / "file").write_text("")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("my own")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    sparring("demo", *words).user_error(parts)


def test_an_interrupted_demo_fails_and_prints_the_command_that_starts_it_again(sparring, monkeypatch):
    real = demo.train

    def train(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    monkeypatch.setattr(demo, "train", train)
    words = ["--out", "my demo", "--epochs", "1"]
    said = sparring("demo", *words)
    assert said.code == 1
    said.one_line("the demo was interrupted", f"Start it again with: {shlex.join(['sparring', 'demo', *words])}")


@pytest.mark.parametrize(
    ("natural", "robust", "parts"),
    [
        ((0.9, 0.95), (0.5, 0.6), ["is more accurate", "more robust under PGD-20"]),
        ((0.9, 0.85), (0.6, 0.5), ["is less accurate", "less robust under PGD-20"]),
        ((0.9, 0.905), (0.5, 0.49), ["is about as accurate", "about as robust under PGD-20"]),
    ],
)
def test_the_conclusion_follows_the_numbers(natural, robust, parts):
    madry, fat = (
        Method(
            name="",
            about="",
            accuracies={"Natural": natural[i], "PGD-20": robust[i]},
            backprops=10.0 - i,
            seconds=1.0,
            history=[],
        )
        for i in (0, 1)
    )
    sentence = demo.conclusion(madry, fat, 450)
    assert all(part in sentence for part in [*parts, "9.0 instead of 10.0"])
