"""`sparring bound` as a command; its numbers are tested in tests/paper/test_bound.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sparring.paper import extremes

FAST = ["--strongest", "pgd", "--limit", "20"]


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_bound_of_a_run(sparring, run):
    said = sparring("bound", "run", *FAST, "--json", "deep/mine.json")
    assert said.code == 0 and said.err == ""
    for words in (
        "natural term",
        "friendly bound",
        "conventional bound",
        "adversarial risk (PGD)",
        "95 % interval",
        "-log2 p_y",
    ):
        assert words in said.out
    written = json.loads(Path("deep/mine.json").read_text())
    assert written == json.loads((run / "evaluation" / "bound-limit20-pgd.json").read_text())
    assert written["eps"] == 0.3  # the radius that the run was trained for
    assert written["n"] == 20 and written["rho"] == 0.1 and "bits" in written["surrogate"]
    assert written["about"]["data"] == "digits" and written["software"]["device"]
    for name in ("natural", "friendly_term", "worst_term", "risk", "friendly", "conventional"):
        assert written[name]["low"] <= written[name]["value"] <= written[name]["high"]
    assert f"rho up to {written['largest_rho']:.4f}" in said.out
    for inequality, finding in written["verdicts"].items():
        assert f"{inequality}: {finding}" in said.out
    assert written["risk"]["value"] <= written["friendly"]["value"]


def test_autoattack_finds_at_least_as_much(sparring, run, monkeypatch):
    """Its first part alone: the others take seconds more and change no claim of this test."""
    real = extremes.parts
    monkeypatch.setattr(extremes, "parts", lambda *args, **kwargs: real(*args, **kwargs)[:1])
    for more in (["--strongest", "pgd"], []):
        assert sparring("bound", run, "--limit", "10", "--eps", "0.1", *more).code == 0
    pgd, auto = (
        json.loads((run / "evaluation" / f"bound-eps0.1-limit10{end}.json").read_text()) for end in ("-pgd", "")
    )
    assert auto["strongest"] == "autoattack" and auto["risk"]["value"] >= pgd["risk"]["value"]


def test_other_settings_go_to_another_file(sparring, run):
    for more in (["--rho", "1/2"], ["--seed", "3"], ["--data", "digits"], ["--which", "best"], ["--resamples", "300"]):
        assert sparring("bound", run, *FAST, *more).code == 0
    assert sparring("bound", run / "best.safetensors", *FAST, "--eps", "0.1").code == 0
    assert {path.stem.removeprefix("bound") for path in (run / "evaluation").glob("*.json")} == {
        "-rho0.5-limit20-pgd",
        "-limit20-seed3-pgd",
        "-digits-limit20-pgd",
        "-limit20-pgd-best",
        "-limit20-resamples300-pgd",
        "-eps0.1-limit20-pgd-best",
    }


def test_an_exported_model_records_its_radius(sparring):
    said = sparring("bound", "fat-digits", *FAST)
    assert said.code == 0 and "Theorem 1 on 20 images, eps 0.3," in said.out


def test_the_same_command_gives_the_same_numbers(sparring, run):
    first = sparring("bound", run, *FAST).out
    assert sparring("bound", run, *FAST).out == first


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["PATH is missing", "A run folder"]),
        (["rum"], ["there is no checkpoint at rum", "Did you mean 'run'?"]),
        (["run", "--eps", "8"], ["eps must lie in (0, 1], got 8.0", "write 8/255"]),
        (["run", "--rho", "-1"], ["rho must be finite and at least 0"]),
        (["run", "--limit", "0"], ["limit must be at least 1"]),
        (["run", "--limit", "9"], ["9 test images: an interval needs at least 10"]),
        (["run", "--seed", "-1"], ["a seed must be a whole number from 0"]),
        (["run", "--resamples", "5"], ["resamples must be at least 100"]),
        (["run", "--strongest", "fgsm"], ["'fgsm'", "('autoattack', 'pgd')"]),
        (["run", "--data", "nowhere"], ["unknown data source"]),
        (["run", "--device", "tpu"], ["tpu"]),
        (["run", "--mean", "0.5"], ["--mean and --std go together"]),
        (["run", "--out", "file"], ["cannot create the folder file: File exists. Choose another with --out."]),
        (["run", "--json", "run"], ["run is a folder. Give a file: --json run/result.json"]),
        (["alone.safetensors"], ["does not record the radius it was trained for. Give it: --eps 8/255."]),
        (["hurt"], ["config.json cannot be read. Give the radius: --eps 8/255."]),
    ],
)
def test_user_errors(sparring, run, tmp_path, words, parts):
    (tmp_path / "file").write_text("")
    shutil.copy(run / "last.safetensors", tmp_path / "alone.safetensors")
    shutil.copytree(run, tmp_path / "hurt")
    (tmp_path / "hurt" / "config.json").write_text("{")
    said = sparring("bound", *words)
    said.user_error(*parts)
    notes = [line for line in said.out.splitlines() if line.startswith("note: hurt/config.json is damaged")]
    assert said.out == "".join(f"{note}\n" for note in notes)  # refused before any work
