"""`sparring evaluate` as a command; its numbers are tested in tests/evaluation."""

from __future__ import annotations

import json
import platform
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import sparring as library
from sparring import weights
from sparring.cli import evaluate as command
from sparring.evaluation.sanity.checks import WHY
from sparring.training import run_folder
from tests.doctored import doctor, replaced

from .conftest import QUICK, start, write_images

FAST = ["--protocol", "quick", "--limit", "20", "--no-doubts"]


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_and_its_checkpoint_files_are_the_same_model(sparring, run):
    assert sparring("evaluate", run, *FAST).code == 0
    assert sparring("evaluate", run / "best.safetensors", *FAST).code == 0
    assert sparring("evaluate", run / "last.safetensors", *FAST).code == 0
    files = sorted((run / "evaluation").glob("*.json"))
    assert [path.name for path in files] == ["quick-limit20-best.json", "quick-limit20.json"]
    assert [json.loads(path.read_text())["about"]["which"] for path in files] == ["best", "last"]


def test_the_header_names_model_images_protocol_and_device(sparring, run):
    device = f"cpu: {platform.processor() or platform.machine()}"
    said = sparring("evaluate", run, *FAST, "--eps", "0.3", "--device", "cpu")
    assert said.out.startswith(
        f"{run} (last checkpoint, epoch 2) on 20 of 450 test images of digits; protocol quick at eps 0.3; {device}\n"
    )
    best = weights.load(run, which="best").facts["epoch"]
    said = sparring("evaluate", run, *FAST, "--which", "best", "--protocol", "quick", "dat", "--device", "cpu")
    assert said.out.startswith(
        f"{run} (best checkpoint, epoch {best}) on 20 of 450 test images of digits; "
        f"protocol quick at eps 8/255 and dat at eps 0.031; {device}\n"
    )
    shutil.copy(run / "best.safetensors", "mine.safetensors")
    said = sparring("evaluate", "mine.safetensors", *FAST)
    assert said.out.startswith(f"mine.safetensors (epoch {best}) on 20 of 450 ")


def test_another_radius_than_in_training_is_noted(sparring, run):
    note = "note: trained for eps 0.3, measured at 0.03137. To measure at 0.3: --eps 0.3."
    assert note in " ".join(sparring("evaluate", run, *FAST).out.split())
    assert "note: trained" not in sparring("evaluate", run, *FAST, "--eps", "0.3").out
    assert note in " ".join(sparring("evaluate", "fat-digits", *FAST).out.split())  # an exported file records it, too


def test_an_unfinished_run_is_noted(sparring, run):
    assert "note: " not in sparring("evaluate", run, *FAST, "--eps", "0.3").out
    doctor(run, replaced(epochs=9))
    said = " ".join(sparring("evaluate", run, *FAST, "--eps", "0.3").out.split())
    assert f"note: {run} has trained 2 of 9 epochs. To finish it: sparring train --out {run} --resume" in said
    (run / run_folder.CONFIG).write_text("{")  # the weights record what they are
    assert sparring("evaluate", run, *FAST).code == 0


def test_other_data_or_normalisation_goes_to_another_file(sparring, run):
    for more in ([], ["--data", "digits"], ["--eps", "0.1"], ["--seed", "2"]):
        assert sparring("evaluate", run, *FAST, *more).code == 0
    assert {path.stem.removeprefix("quick") for path in (run / "evaluation").glob("*.json")} == {
        "-limit20",
        "-digits-limit20",
        "-eps0.1-limit20",
        "-limit20-seed2",
    }
    normalised = ["--mean", "0.5", "--std", "1/4"]
    sparring("evaluate", run, *FAST, *normalised).user_error("contains its normalisation", "Leave out --mean")
    bare = {name: tensor.clone() for name, tensor in library.load_model(run).state_dict().items()}
    torch.save(bare, "theirs.pth")
    assert sparring("evaluate", "theirs.pth", "--data", "digits", *FAST, *normalised).code == 0
    assert [path.stem for path in Path("evaluation/theirs").glob("*.json")] == ["quick-digits-mean0.5-std0.25-limit20"]


def test_images_of_other_classes_are_refused(sparring, tmp_path):
    """Even with the same number of classes: the labels would mean other classes."""
    write_images(tmp_path / "mine", count=100)
    shutil.copytree(tmp_path / "mine", tmp_path / "renamed")
    (tmp_path / "renamed" / "digit 0").rename(tmp_path / "renamed" / "zero")
    given = ["--data", "folder:mine", "--validation", "20", "--out", "run"]
    assert sparring("train", *QUICK, *given).code == 0
    said = sparring("evaluate", "run", "--data", "folder:renamed", *FAST)
    said.user_error("run was made for other classes: its class 0 is 'digit 0', that of renamed 'digit 1'")
    (tmp_path / "mine").rename(tmp_path / "moved")
    sparring("evaluate", "run", *FAST).user_error("no such folder: mine", "run was trained on folder:mine", "--data")
    assert sparring("evaluate", "run", "--data", "folder:moved", *FAST).code == 0


def test_steps_that_do_not_reach_the_edge_are_reported(sparring, run):
    words = ["--protocol", "trades", "--limit", "4", "--no-doubts"]
    said = sparring("evaluate", run, *words, "--eps", "0.3")
    told = " ".join(said.out.split())
    assert "pgd20: 20 steps of 0.003 reach only 0.06 of eps 0.3." in told and "fgsm: 1" not in told
    assert "reach only" not in sparring("evaluate", run, *words).out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full; nothing to install")
def test_output_that_cannot_be_written_is_an_error(sparring, run, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        said = sparring("evaluate", run, *FAST)
    assert said.code == 1 and said.err == "sparring: the output could not be written: No space left on device.\n"
    assert (run / "evaluation" / "quick-limit20.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["PATH is missing", "A run folder"]),
        (["rum"], ["there is no checkpoint at rum", "Did you mean 'run'?"]),
        (["run/worst.safetensors"], ["no checkpoint at run/worst.safetensors"]),
        (["run/config.json"], ["run/config.json is a text file", ".safetensors"]),
        (["cut.safetensors"], ["cut.safetensors is not a"]),
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
        (["run", "--out", "file"], ["cannot create the folder file: File exists. Choose another with --out."]),
        (["run", "--json", "file/x.json"], ["cannot create the folder file: File exists. Choose another with --json."]),
        (["run", "--json", "run"], ["run is a folder. Give a file: --json run/result.json"]),
    ],
)
def test_user_errors_are_one_line(sparring, run, tmp_path, words, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "cut.safetensors").write_bytes((run / "last.safetensors").read_bytes()[:3000])
    said = sparring("evaluate", *words)
    said.user_error(*says)
    assert said.out == ""  # fails before any work


def test_an_unwritable_folder_fails_before_the_work(sparring, run, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    said = sparring("evaluate", run, *FAST)
    said.user_error("is not writable. Choose another with --out.")
    assert said.out == ""


def test_a_stopped_evaluation_continues(sparring, run, tmp_path):
    words = ["evaluate", "run", "--protocol", "mart", "--no-doubts", "--limit", "300"]
    child = start(*words, cwd=tmp_path)
    verdicts = run / "evaluation" / "verdicts"
    while not list(verdicts.glob("*/natural-*.npz")):
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate()
    assert child.returncode == 1 and out == ""
    assert err == "sparring: stopped. The same command continues where it stopped.\n"
    known = {path: path.stat().st_mtime_ns for path in verdicts.glob("*/natural-*.npz")}
    assert sparring(*words).code == 0
    assert known and all(path.stat().st_mtime_ns == written for path, written in known.items())


def test_the_file_name_contains_no_slash():
    asked = command.Options(Path("run"), data="folder:my/own images?size=8")
    assert re.fullmatch(r"dat-folder-my-own-images-size=8-[0-9a-f]{8}", command._name(asked))


def test_similar_data_sets_have_different_file_names():
    alike = ["folder:my/images", "folder:my-images", "folder:my images", "npz:" + 300 * "a", "npz:" + 301 * "a"]
    names = [command._name(command.Options(Path("run"), data=data)) for data in alike]
    assert len(set(names)) == len(alike) and max(map(len, names)) < 100
    assert command._name(command.Options(Path("run"), data="cifar10:bird+deer")) == "dat-cifar10-bird-deer"


def test_json_records_what_was_evaluated(sparring, run):
    assert sparring("evaluate", run, *FAST, "--json", "deep/er/mine.json").code == 0
    written = json.loads(Path("deep/er/mine.json").read_text())
    assert written["about"]["data"] == "digits" and written["about"]["facts"]["recipe"] == "fat-digits"


def test_models_of_the_same_name_do_not_share_results(sparring, run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(run / "last.safetensors", tmp_path / name / "model.safetensors")
    words = [*FAST, "--data", "digits"]
    assert sparring("evaluate", tmp_path / "a" / "model.safetensors", *words).code == 0
    assert sparring("evaluate", "a/model.safetensors", *words).code == 0  # the same file
    again = sparring("evaluate", "b/model.safetensors", *words)
    again.user_error("model holds results of ", "a/model.safetensors", "those of b/model.safetensors: --out")
    assert sparring("evaluate", "b/model.safetensors", *words, "--out", "elsewhere").code == 0


@pytest.mark.parametrize(("name", "more"), [("evaluate", FAST), ("bound", ["--limit", 40, "--eps", 0.3])])
def test_results_of_another_model_are_not_overwritten(sparring, run, tmp_path, name, more):
    shutil.copytree(run, tmp_path / "other")
    assert sparring(name, run, *more, "--out", "mine").code == 0
    (file,) = Path("mine").glob("*.json")
    before = file.read_bytes()
    sparring(name, "other", *more, "--out", "mine").user_error("mine holds results of ", "run", "those of other: --out")
    assert file.read_bytes() == before
    assert sparring(name, run, *more, "--out", "mine").code == 0  # its own results
    assert sparring(name, "other", *more, "--seed", 3, "--out", "mine").code == 0  # another file


def test_a_result_that_cannot_be_saved_is_still_shown(sparring, run, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(command, "write_text", full)
    said = sparring("evaluate", run, *FAST)
    assert said.code == 2 and "worst case" in said.out and "wrote" not in said.out
    assert said.err.count("\n") == 1 and "quick-limit20.json cannot be read or written: no space left" in said.err


@pytest.mark.parametrize("command_", ["evaluate", "bound"])
def test_an_invalid_seed_is_refused(sparring, run, command_):
    sparring(command_, run, "--limit", 20, "--seed", 2**63).user_error(
        "a seed must be a whole number from 0 to 2^63 - 1"
    )


@pytest.mark.parametrize(
    ("y", "said"), [([0] * 9 + [1], "90.0%"), ([0, 0, 1, 2], "50.0%"), ([0, 0, 1], ""), ([0, 0], "")]
)
def test_a_dominant_class_is_noted(capsys, y, said):
    command.note_classes(torch.tensor(y), len(y))
    assert capsys.readouterr().out == (
        f"note: {said} of these images are of one class: always predicting it reaches that accuracy.\n" if said else ""
    )


def test_images_of_another_size_are_refused(sparring, run, tmp_path):
    x, y = np.arange(40 * 144).reshape(40, 12, 12) % 251, np.arange(40) % 10
    images = {
        f"{kind}_{part}": array for part in ("train", "test") for kind, array in (("x", x.astype(np.uint8)), ("y", y))
    }
    np.savez(tmp_path / "large.npz", **images)
    refused = sparring("evaluate", run, *FAST, "--data", "npz:large.npz")
    refused.user_error("was made for images of 8x8, those of large are 12x12.")


@pytest.mark.parametrize(
    "words",
    [
        ["--explain", "zero-gradients"],
        ["fat-digits", "--explain", "zero-gradients"],
        ["--explain=zero-gradients", "no/such/model"],
        ["fat-digits", "--protocol", "dat", "autoattack", "--eps", "8/255", "--explain", "zero-gradients"],
    ],
)
def test_explain_prints_the_page_of_a_doubt(sparring, words):
    said = sparring("evaluate", *words)
    assert said.code == 0 and said.err == ""
    assert "zero-gradients" in said.out.splitlines()[0] and "What to do" in said.out and "##" not in said.out


@pytest.mark.parametrize("words", [["--explain", "list"], ["--explain"], ["fat-digits", "--explain"]])
def test_explain_lists_the_doubts(sparring, words):
    said = sparring("evaluate", *words)
    assert said.code == 0 and all(name in said.out for name in WHY)


@pytest.mark.parametrize("model", [[], ["fat-digits"]])
def test_an_unknown_doubt_lists_the_names(sparring, model):
    said = sparring("evaluate", *model, "--explain=zero-gradient")
    said.user_error("unknown doubt 'zero-gradient'", "Did you mean 'zero-gradients'?", "train-mode")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fat-digits", "--explain", "list", "--limt", "3"], "--limt"),
        (["fat-digits", "--explain", "list", "another"], "another"),
        (["fat-digits", "--explain", "--limit", "3"], "Missing value for argument '--explain'"),
    ],
)
def test_explain_checks_the_other_words(sparring, words, named):
    sparring("evaluate", *words).user_error(named)
