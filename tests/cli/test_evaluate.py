"""`sparring evaluate` as a command; its numbers are tested in tests/evaluation."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from sparring.cli import evaluate as command

from .conftest import start

FAST = ["--protocol", "quick", "--limit", "20", "--no-doubts"]


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_and_its_files_are_one_subject(sparring, run):
    assert sparring("evaluate", run, *FAST).code == 0
    assert sparring("evaluate", run / "best.safetensors", *FAST).code == 0
    assert sparring("evaluate", run / "last.safetensors", *FAST).code == 0
    files = sorted((run / "evaluation").glob("*.json"))
    assert [path.name for path in files] == ["quick-limit20-best.json", "quick-limit20.json"]
    assert [json.loads(path.read_text())["about"]["which"] for path in files] == ["best", "last"]


def test_another_radius_than_the_runs_is_worth_a_line(sparring, run):
    told = "note: trained for eps 0.3, measured at 0.03137. There: --eps 0.3."
    assert told in " ".join(sparring("evaluate", run, *FAST).out.split())
    assert "note: trained" not in sparring("evaluate", run, *FAST, "--eps", "0.3").out


def test_other_data_or_normalisation_is_another_file(sparring, run):
    for more in ([], ["--data", "digits"], ["--mean", "0.5", "--std", "1/4"], ["--eps", "0.1"], ["--seed", "2"]):
        assert sparring("evaluate", run, *FAST, *more).code == 0
    assert {path.stem.removeprefix("quick") for path in (run / "evaluation").glob("*.json")} == {
        "-limit20",
        "-digits-limit20",
        "-mean0.5-std0.25-limit20",
        "-eps0.1-limit20",
        "-limit20-seed2",
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["PATH is missing", "A run folder"]),
        (["rum"], ["there is no checkpoint at rum", "Did you mean 'run'?"]),
        (["run/worst.safetensors"], ["no checkpoint at run/worst.safetensors"]),
        (["run/config.json"], ["run/config.json is a text file", ".safetensors"]),
        (["cut.safetensors"], ["cut.safetensors is not a whole safetensors file"]),
        (["."], ["is not a run folder", "cut.safetensors"]),
        (["run", "--protocol", "trade"], ["unknown protocol 'trade'", "Did you mean 'trades'?"]),
        (["run", "--protocol"], ["name at least one protocol"]),
        (["run", "--eps", "8"], ["eps must lie in (0, 1], got 8.0", "write 8/255"]),
        (["run", "--eps", "x"], ["--eps: 'x' is not a number"]),
        (["run", "--limit", "0"], ["limit must be at least 1"]),
        (["run", "--limt", "5"], ["Did you mean --limit?"]),
        (["run", "--which", "worst"], ["'worst'", "('last', 'best')"]),
        (["run", "--model", "resnet18"], ["does not fit 'resnet18'", "looks like 'tiny_cnn'"]),
        (["run", "--mean", "0.5"], ["--mean and --std go together"]),
        (["run", "--out", "file"], ["cannot make the folder file: File exists. Choose another with --out."]),
        (["run", "--json", "file/x.json"], ["cannot make the folder file: File exists. Choose another with --json."]),
        (["run", "--json", "run"], ["run is a folder. Name a file: --json run/result.json"]),
    ],
)
def test_what_the_user_can_mend(sparring, run, tmp_path, words, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "cut.safetensors").write_bytes((run / "last.safetensors").read_bytes()[:3000])
    said = sparring("evaluate", *words)
    said.mends(*says)
    assert said.out == ""  # told before any work


def test_a_folder_that_is_not_writable_is_told_before_the_work(sparring, run, monkeypatch):
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)  # as root everything is
    said = sparring("evaluate", run, *FAST)
    said.mends("is not writable. Choose another with --out.")
    assert said.out == ""


def test_stopped_and_started_again_it_continues(sparring, run, tmp_path):
    words = ["evaluate", "run", "--protocol", "mart", "--no-doubts", "--limit", "300"]
    child = start(*words, cwd=tmp_path)
    verdicts = run / "evaluation" / "verdicts"
    while not list(verdicts.glob("*/natural-*.npz")):
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate()
    assert child.returncode == 1 and out == ""
    assert err == "sparring: stopped. The same command continues where it was.\n"
    known = {path: path.stat().st_mtime_ns for path in verdicts.glob("*/natural-*.npz")}
    assert sparring(*words).code == 0
    assert known and all(path.stat().st_mtime_ns == written for path, written in known.items())


def test_the_name_of_the_file_holds_no_slash():
    asked = command.Arguments(Path("run"), data="folder:my/own images?size=8")
    assert command._name(asked) == "dat-folder-my-own-images-size=8"


def test_json_says_what_was_evaluated(sparring, run):
    assert sparring("evaluate", run, *FAST, "--json", "deep/er/mine.json").code == 0
    told = json.loads(Path("deep/er/mine.json").read_text())
    assert told["about"]["data"] == "digits" and told["about"]["facts"]["recipe"] == "fat-digits"
