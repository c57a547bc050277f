"""Pages of runs that are unfinished, damaged, or trained further since they were evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sparring.paper import specs
from sparring.report.gather import methods
from sparring.training import run_folder
from tests.cli.test_report import ITEMS, page


def test_another_file_among_the_evaluations_is_left_out_and_reported(sparring, finished):
    shutil.copytree(finished, "run")
    assert sparring("evaluate", "run", "--protocol", "quick", "--limit", "20", "--no-doubts", "--eps", "0.3").code == 0
    Path("run/evaluation/mine.json").write_text('{"my": "notes"}')
    said = sparring("report", "run", "--strips", 0)
    text = "Left out (not an evaluation): run/evaluation/mine.json."
    assert said.code == 0 and text in said.out and text in Path("report.html").read_text()
    assert "20 images of digits" in Path("report.html").read_text()


def test_a_run_without_a_finished_epoch_is_a_user_error(sparring, finished):
    shutil.copytree(finished, "run")
    for name in ("metrics.jsonl", "last.safetensors", "best.safetensors"):
        Path("run", name).unlink()
    sparring("report", "run").user_error("no finished epoch", "--resume")


def begin(folder, source):
    """Make a run that is in its first epoch."""
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)


def test_a_run_without_a_finished_epoch_is_left_out_and_the_page_says_so(
    sparring, finished, measured, tmp_path, monkeypatch
):
    shutil.copytree(finished, tmp_path / "all" / "done")
    begin(tmp_path / "all" / "young", finished)
    said = sparring("report", "all", "--strips", 1)
    left_out = "Left out (no finished epoch): all/young."
    assert said.code == 0 and said.out == f"{left_out}\nwrote report.html\n", said
    text, reader = page()
    assert left_out in reader.text and "<h1>done</h1>" in text and '<figure class="strip"' in text
    # With results on the page, no run has to be left.
    monkeypatch.setattr(specs, "ITEMS", ITEMS)
    said = sparring("report", measured / "results", "all/young")
    assert said.code == 0 and "all/young" in said.out and "no finished epoch" in page()[1].text
    shutil.rmtree("all/done")
    begin(tmp_path / "all" / "younger", finished)
    sparring("report", "all").user_error("all/young has no finished epoch", "--resume")


def test_damaged_runs_are_left_out_with_the_reason(sparring, finished, tmp_path):
    for name in ("good", "cut", "empty", "torn", "starts", "bytes"):
        shutil.copytree(finished, tmp_path / "all" / name)
    cut = tmp_path / "all" / "cut" / "metrics.jsonl"
    cut.write_text(cut.read_text().splitlines()[0] + "\n")
    (tmp_path / "all" / "empty" / "metrics.jsonl").write_text("")
    torn = tmp_path / "all" / "torn" / "config.json"
    torn.write_text(torn.read_text()[:100])
    (tmp_path / "all" / "starts" / "environment.json").write_text("[{")
    (tmp_path / "all" / "bytes" / "metrics.jsonl").write_bytes(b"[]\n\xff\xfe\n")
    said = sparring("report", "all", "--strips", 0)
    assert said.code == 0 and said.out.count("Left out: ") == 5 and "<h1>good</h1>" in page()[0]
    text = "all/cut/metrics.jsonl is damaged: of 2 epochs each should have a record, there are 1."
    assert text in page()[1].text
    assert "all/empty/metrics.jsonl is damaged" in said.out and "all/torn/config.json is damaged" in said.out
    sparring("report", "all/torn").user_error("is damaged")


def test_an_evaluation_during_training_has_the_costs_up_to_it(sparring, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    words = ["--protocol", "quick", "--eps", "0.3", "--limit", "40", "--no-doubts", "--device", "cpu"]
    assert sparring("evaluate", run, *words).code == 0
    (path,) = (run / "evaluation").glob("*.json")
    written = json.loads(path.read_text())
    written["about"]["facts"] |= {"epoch": 1, "step": 3}
    path.write_text(json.dumps(written))
    (row,) = methods(run)
    first, second = run_folder.read_metrics(run)
    assert "checkpoint of epoch 1 and 3 steps" in row.measured and "1 of 2 epochs" in row.about
    assert (row.backprops, row.seconds) == (first["backprops"], first["seconds"])
    written["about"] |= {"which": "best"}  # chosen among all epochs
    path.write_text(json.dumps(written))
    (row,) = methods(run)
    assert row.seconds == first["seconds"] + second["seconds"]
    written["about"] |= {"which": "last"}
    written["about"]["facts"] |= {"epoch": 0}
    path.write_text(json.dumps(written))
    (row,) = methods(run)
    assert "0 of 2 epochs" in row.about and (row.backprops, row.seconds) == (0.0, 0)


def test_records_may_be_ahead_of_the_checkpoint(finished, tmp_path):
    """After a kill between the two, or if epochs are too short for a checkpoint each."""
    run = shutil.copytree(finished, tmp_path / "run")
    records = run_folder.read_metrics(run)
    run_folder.RunFolder(run, run_folder.open_run(run).config, "").record({**records[-1], "epoch": 3})
    assert len(run_folder.whole_history(run)) == 3
