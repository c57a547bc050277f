"""Two at once on the same files: both succeed, or one says in one line why not; no traceback, and no torn file."""

from __future__ import annotations

import itertools
from pathlib import Path

import sparring.cli.compare
import sparring.cli.evaluate
import sparring.cli.report
import sparring.cli.reproduce  # the processes are forked from one that has these
import sparring.cli.train  # noqa: F401
from sparring.cli import main
from sparring.evaluation import Result
from sparring.files.leftovers import target
from sparring.paper import results, specs
from tests.cli import at_once
from tests.cli.conftest import QUICK
from tests.paper.tiny import COURSE, TABLE
from tests.training.test_loop import same_run

EVALUATE = ["--protocol", "quick", "--eps", "0.3", "--limit", "30", "--no-doubts", "--device", "cpu"]


def tiny_items() -> None:
    specs.ITEMS = {item.name: item for item in (TABLE, COURSE)}


def whole(folder: Path) -> None:
    """Nothing half-written is left in a folder."""
    assert not [path for path in folder.rglob("*") if target(path)]


def fine(said) -> bool:
    """Whether a command succeeded; where it did not, that it said why in one line."""
    assert "Traceback" not in said.err + said.out, said
    if said.code:
        said.user_error()
    return said.code == 0


def test_two_trainings_into_one_folder(tmp_path, finished):
    words = ["train", *QUICK, "--out", "run"]
    said = at_once.run(words, words, cwd=tmp_path, notes=tmp_path / "notes")
    assert sorted(each.code for each in said) == [0, 2], said
    refused = next(each for each in said if each.code)
    assert "is in use by another training process" in refused.err or "already holds a run" in refused.err
    refused.user_error()
    same_run(tmp_path / "run", finished)
    whole(tmp_path / "run")


def test_reading_a_run_that_is_training(tmp_path):
    """Its evaluation, page and table are there, or it is said what is not there yet; the run itself is undisturbed."""
    longer = ["--epochs", "8", "--batch-size", "64"]  # a few seconds
    trainings = at_once.start(
        ["train", *QUICK, *longer, "--out", "read"],
        ["train", *QUICK, *longer, "--out", "alone"],
        cwd=tmp_path,
        notes=tmp_path / "notes",
    )
    commands = itertools.cycle(
        [
            ["report", "read", "--out", "page.html", "--strips", "1"],
            ["evaluate", "read", *EVALUATE],
            ["compare", "read"],
            ["report", "read", "--out", "page.html", "--strips", "0"],
        ]
    )
    succeeded = 0
    while trainings[0].running:
        pair = [next(commands), next(commands)]
        succeeded += sum(map(fine, at_once.run(*pair, cwd=tmp_path, notes=tmp_path / "notes")))
    assert [each.outcome().code for each in trainings] == [0, 0]
    assert succeeded > 0
    same_run(tmp_path / "read", tmp_path / "alone")
    for path in (tmp_path / "read" / "evaluation").glob("*.json"):
        Result.read(path)
    whole(tmp_path / "read")


def test_two_reproductions_into_one_folder(tmp_path, measured):
    words = ["reproduce", "table-tiny", "--device", "cpu"]
    said = at_once.run(words, words, cwd=tmp_path, notes=tmp_path / "notes", prepare=tiny_items)
    assert [each.code for each in said] == [0, 0], said
    out = said[0].out + said[1].out
    files = sorted(path.name for path in (tmp_path / "results" / "table-tiny").glob("*.json*"))
    assert files == ["fat-lite-seed0.json", "madry-lite-seed0.json"]
    for name in files:
        ours, alone = (results.read(top / "results" / "table-tiny" / name) for top in (tmp_path, measured))
        assert ours["state"] == "measured" and ours["starts"] == 1
        right = [{key: one["right"] for key, one in each["found"]["attacks"].items()} for each in (ours, alone)]
        assert right[0] == right[1]
        assert out.count(f"wrote results/table-tiny/{name}") == 1  # shared: each is measured once
    same = [path.name for path in (tmp_path / "runs" / "paper").iterdir()]
    for name in same:
        same_run(tmp_path / "runs" / "paper" / name, measured / "runs" / name)
    whole(tmp_path / "results")


def test_two_evaluations_into_one_folder(tmp_path, finished):
    words = ["evaluate", finished, *EVALUATE, "--out"]
    notes = tmp_path / "notes"
    said = at_once.run([*words, "both"], [*words, "both"], [*words, "alone"], cwd=tmp_path, notes=notes)
    assert [each.code for each in said] == [0, 0, 0], said
    (both,), (alone,) = ((tmp_path / name).glob("*.json") for name in ("both", "alone"))
    found, expected = Result.read(both), Result.read(alone)
    assert [record.correct.tolist() for record in found] == [record.correct.tolist() for record in expected]
    whole(tmp_path / "both")
    # The verdicts that two processes left serve a third.
    assert main([*map(str, words), str(tmp_path / "both")]) == 0


def test_two_pages_of_one_name(tmp_path, finished):
    words = ["report", finished, "--out", "page.html", "--strips", 0]
    said = at_once.run(words, words, cwd=tmp_path, notes=tmp_path / "notes")
    assert [each.code for each in said] == [0, 0], said
    text = (tmp_path / "page.html").read_text()
    assert text.count("<html") == 1 and text.rstrip().endswith("</html>")
    whole(tmp_path)
