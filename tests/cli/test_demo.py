"""`sparring demo`, shortened to one epoch."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal

import pytest
import torch

import sparring as library
from sparring.cli import demo
from sparring.report.gather import methods
from sparring.report.page import Method


def test_the_demo(sparring, tmp_path):
    said = sparring("demo", "--epochs", "1", "--seed", "1", "--out", "a demo")
    assert said.code == 0 and said.err == ""
    for word in ("Standard", "Madry", "FAT", *demo.ATTACKS, "mean BPs", "seconds", "a demo/index.html"):
        assert word in said.out
    assert "Friendly training is" in said.out
    page = (tmp_path / "a demo" / "index.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "<svg" in page and not re.findall(r'src="(?!data:)|<link[^>]* href="(?!data:)', page)  # self-contained
    told = json.loads((tmp_path / "a demo" / "demo.json").read_text())
    assert told["seed"] == 1 and told["n"] == 450 and set(told["methods"]) == {"Standard", "Madry", "FAT"}
    assert told["methods"]["Standard"]["backprops"] == 0 and told["methods"]["Madry"]["backprops"] == 10
    assert 0 < told["methods"]["FAT"]["backprops"] < 10
    assert library.load_model(tmp_path / "a demo" / "fat")(torch.rand(1, 1, 8, 8)).shape == (1, 10)


def test_the_demo_says_how_it_measured_and_leaves_that_to_a_report(sparring, tmp_path):
    said = sparring("demo", "--epochs", "1", "--out", "demo")
    again = "sparring evaluate demo/fat --protocol mart --eps 0.3"
    text = (tmp_path / "demo" / "index.html").read_text(encoding="utf-8")
    assert "Protocol mart: steps of eps/10" in said.out and f"{again}\n" in said.out
    assert "the protocol mart’s, in steps of eps/10" in text.replace("&#39;", "’") and f"<code>{again}</code>" in text
    told = json.loads((tmp_path / "demo" / "demo.json").read_text())["methods"]
    own = {column: told["FAT"][column] for column in demo.ATTACKS}
    (row,) = methods(tmp_path / "demo" / "fat")
    assert row.measured == "eps 0.3, 450 images of digits, protocol mart" and own.items() <= row.accuracies.items()
    # The command that it names gives the same numbers, in the same place.
    assert sparring(*again.split()[1:], "--no-doubts").code == 0
    assert [path.name for path in (tmp_path / "demo" / "fat" / "evaluation").glob("*.json")] == ["mart-eps0.3.json"]
    assert methods(tmp_path / "demo" / "fat")[0].accuracies == row.accuracies
    assert sparring("report", "demo", "--walks", "0").code == 0
    assert "(validation)" not in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
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
def test_what_the_user_can_mend(sparring, tmp_path, words, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("my own")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    sparring("demo", *words).mends(says)


def test_an_interrupted_demo_failed_and_says_how_to_start_it_again(sparring, monkeypatch):
    really = demo.train

    def train(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return really(*args, **kwargs)

    monkeypatch.setattr(demo, "train", train)
    words = ["--out", "my demo", "--epochs", "1"]
    said = sparring("demo", *words)
    assert said.code == 1
    said.one_line("the demo was interrupted", f"Start it again with: {shlex.join(['sparring', 'demo', *words])}")


@pytest.mark.parametrize(
    ("natural", "robust", "says"),
    [
        ((0.9, 0.95), (0.5, 0.6), ["is more accurate", "PGD-20 better"]),
        ((0.9, 0.85), (0.6, 0.5), ["is less accurate", "PGD-20 worse"]),
        ((0.9, 0.905), (0.5, 0.49), ["is about as accurate", "PGD-20 about as well"]),
    ],
)
def test_the_verdict_says_which_way_it_fell(natural, robust, says):
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
    sentence = demo.verdict(madry, fat, 450)
    assert all(part in sentence for part in [*says, "9.0 instead of 10.0"])


def test_brackets_in_a_path_are_letters(sparring):
    name = "demo [v2][/v3]"
    said = sparring("demo", "--epochs", 1, "--out", name)
    assert said.code == 0 and f"Read why: {name}/index.html" in said.out and f"load_model('{name}/fat')" in said.out
