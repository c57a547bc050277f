"""`sparring compare`: runs, folders of runs, patterns and results, in tables or as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

import sparring as library
from sparring.cli import compare, main
from sparring.data import load
from sparring.evaluation import Result
from sparring.training import run_folder
from tests.doctored import doctor, replaced


def edit(folder: Path, *, number: float = 0.0, **changes) -> None:
    """Change a run's configuration (attack_tau for attack.tau), and raise its last natural accuracy."""
    doctor(folder, replaced(**changes), lambda records: records[-1].update(natural=0.5 + number, pgd10=0.9))


@pytest.fixture(scope="module")
def result(finished) -> Result:
    images = load("digits").test
    model = library.load_model(finished)
    return library.evaluate(model, images.x, images.y, "mart", eps=0.3, limit=40, doubts=False)


@pytest.fixture
def runs(finished, tmp_path, result) -> Path:
    """Two seeds of tau 0 and one of tau 1, all evaluated."""
    for name, tau, seed in (("a-seed0", "0", 0), ("a-seed1", "0", 1), ("b-seed0", "1", 0)):
        folder = shutil.copytree(finished, tmp_path / "runs" / name)
        edit(folder, number=0.2 * seed, attack_tau=tau, seed=seed)
        result.save(folder / run_folder.EVALUATION / "mart.json")
    return tmp_path / "runs"


def lines(text: str, start: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip().startswith(start)]


def test_tables_of_what_differs_and_what_came_out(sparring, runs, result):
    said = sparring("compare", "runs")
    assert said.code == 0 and said.err == "", said
    trained, tested = (" ".join(words) for words in lines(said.out, "run "))
    assert trained == "run tau seeds best natural best PGD-10 last natural last PGD-10 BPs seconds"
    assert tested == "run tau seeds Natural FGSM PGD-20 C&W Worst case"
    first, again = lines(said.out, "a ")  # seeds together
    assert first[:6] == ["a", "0", "2", "60.00", "±", "14.14"]
    natural = f"{100 * result['natural'].accuracy:.2f}"
    assert again[:6] == ["a", "0", "2", natural, "±", "0.00"]
    assert lines(said.out, "b-seed0")[0][:4] == ["b-seed0", "1", "1", "50.00"]
    shared = next(line for line in said.out.splitlines() if line.startswith("Common to all: "))
    assert "epochs 2" in shared and "attack.steps 2" in shared and "tau" not in shared and "seed" not in shared
    assert "eps 0.3, 40 images of digits, protocol mart" in said.out
    assert sparring("compare", "runs/a-*", "runs/b-seed0", "runs").out == said.out  # patterns; a run counts once


def test_rows_for_machines(sparring, runs, result):
    result.save("mine.json")
    said = sparring("compare", "runs", "mine.json", "--csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert said.code == 0 and [Path(row["path"]).name for row in rows] == ["a-seed0", "a-seed1", "b-seed0", "mine.json"]
    assert [row["seed"] for row in rows] == ["0", "1", "0", ""] and rows[2]["attack.tau"] == "1"
    assert rows[0]["status"] == "finished" and rows[3]["status"] == "result"
    assert float(rows[1]["last.natural"]) == 0.7 and int(rows[1]["n"]) == 40
    for row in rows:
        assert float(row["test.natural"]) == result["natural"].accuracy
        assert float(row["test.pgd20"]) == result["pgd20"].accuracy


def test_unfinished_and_damaged_runs_are_one_line_each(sparring, runs):
    edit(runs / "b-seed0", epochs=5)
    (runs / "young").mkdir()
    shutil.copy(runs / "a-seed0" / run_folder.CONFIG, runs / "young")
    (runs / "torn").mkdir()
    (runs / "torn" / run_folder.CONFIG).write_text("{")
    cut = shutil.copytree(runs / "a-seed0", runs / "cut") / run_folder.METRICS
    cut.write_text('{"epoch": 1, "natural": 0.5}\n{"epoch": 2}\n')
    said = sparring("compare", "runs")
    assert said.code == 0 and said.err == ""
    assert "unfinished: runs/b-seed0 (2 of 5 epochs, natural 50.00 %, PGD-10 90.00 %)" in said.out
    assert "unfinished: runs/young (0 of 2 epochs)" in said.out
    assert said.out.count("left out: runs/torn/config.json is damaged") == 1
    assert said.out.count("left out: runs/cut/metrics.jsonl was edited or damaged: ") == 1
    as_csv = sparring("compare", "runs", "--csv")
    assert as_csv.code == 0 and as_csv.err.count("left out: ") == 2
    assert {row["status"] for row in csv.DictReader(io.StringIO(as_csv.out))} == {"finished", "unfinished"}
    sparring("compare", "runs/torn").user_error("config.json is damaged")
    assert sparring("compare", "runs/young").code == 0


def test_results_alone(sparring, result):
    result.save("my models/mine.json")
    said = sparring("compare", "my models/mine.json")
    assert said.code == 0 and "40 images of the caller's data" in said.out and "validation" not in said.out
    assert lines(said.out, "mine")[0][1] == f"{100 * result['natural'].accuracy:.2f}"


def test_user_errors(sparring, finished, tmp_path):
    sparring("compare").user_error("which runs?", "sparring compare runs")
    sparring("compare", "nope").user_error("nope does not exist")
    sparring("compare", "runs/*").user_error("no file or folder matches runs/*")
    sparring("compare", finished / "last.safetensors").user_error("neither a run folder nor a result", "folder")
    (tmp_path / "odd.json").write_text("[]")
    sparring("compare", "odd.json").user_error("odd.json is not a result", "result.save")
    (tmp_path / "empty").mkdir()
    sparring("compare", "empty").user_error("empty holds no run")


def test_a_result_by_class_and_saved(result, tmp_path):
    by_class = result.per_class("natural")
    assert list(by_class) == sorted(by_class)
    counts = result.labels.bincount(minlength=10).tolist()
    total = sum(counts[label] * accuracy for label, accuracy in by_class.items())
    assert total / result.n == pytest.approx(result["natural"].accuracy)
    result.save(str(tmp_path / "new" / "mine.json"))
    again = Result.from_json((tmp_path / "new" / "mine.json").read_text())
    assert again.per_class() == result.per_class()
    old = json.loads(result.to_json())
    del old["labels"]
    with pytest.raises(library.UserError, match="has no labels"):
        Result.from_json(json.dumps(old)).per_class()
    with pytest.raises(library.UserError, match="is a folder"):
        result.save(tmp_path)
    with pytest.raises(library.UserError, match="takes the path of a file, got int"):
        result.save(3)


def test_a_page_of_seeds_and_results(sparring, runs, result):
    shutil.copytree(runs / "b-seed0", runs / "c-seed0")
    edit(runs / "c-seed0", attack_tau="2")
    result.save("mine.json")
    assert main(["report", "mine.json", "runs", "--strips", "0"]) == 0
    text = Path("report.html").read_text()
    assert "5 models compared" in text and "4 runs and 1 result: a, b, c, mine." in text.replace("-seed0", "")
    assert "mean ± standard deviation of seeds 0, 1" in text and '<h2 id="settings">What differs</h2>' in text
    for drawn in ("Accuracy by tau (%) at 0, 1, 2: Natural", "Training loss, by epoch", "Worst case by class (%)"):
        assert f'aria-label="{drawn}' in text, drawn
    assert '<td role="cell" class="value" data-column="tau">1</td>' in text and "result in mine.json" in text
    assert "Learning rate, by epoch" in text


@pytest.mark.parametrize(("width", "joined"), [(200, True), (60, False)])
def test_a_narrow_terminal_loses_no_number(sparring, runs, monkeypatch, width, joined):
    screen = compare.Screen
    monkeypatch.setattr(
        compare, "Screen", lambda **options: screen(**{"force_terminal": True, "width": width} | options)
    )
    said = sparring("compare", "runs")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.out)
    assert ("60.00 ± 14.14" in plain) == joined and ("What differs" in plain) != joined
    assert "± 14.1" in plain and "…" not in plain
