"""`sparring report`: runs and results on one page, rendered in a browser if there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sparring.cli.evaluate import run as evaluate
from sparring.errors import UserError
from sparring.paper import specs
from sparring.report.content import Method
from sparring.report.gather import methods
from sparring.report.page import table
from sparring.training import run_folder
from tests.doctored import doctor, replaced
from tests.paper.tiny import COURSE, TABLE
from tests.report.test_page import CHROMIUM, Reader, make_path

ITEMS = {item.name: item for item in (TABLE, COURSE, specs.find("fig-motivation"))}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(specs, "ITEMS", ITEMS)


@pytest.fixture(scope="session")
def evaluated(finished, tmp_path_factory):
    """The finished run with an evaluation."""
    folder = tmp_path_factory.mktemp("evaluated") / "fat-run"
    shutil.copytree(finished, folder)
    words = ["--protocol", "mart", "--eps", "0.3", "--limit", "40", "--no-doubts", "--device", "cpu"]
    assert evaluate([str(folder), *words]) == 0
    return folder


def page(path="report.html"):
    text = Path(path).read_text(encoding="utf-8")
    return text, Reader(text)


def test_a_page_of_the_papers_items(sparring, measured):
    said = sparring("report", measured / "results")
    assert said.code == 0 and said.out == "wrote report.html\n", said
    text, reader = page()
    words = reader.text.replace("\u00a0", " ")
    assert "Table 0 of the paper" in words and "89.34 ± 0.22" in words and "FAT is more accurate." in words
    assert "Figure 0 of the paper" in words and "Trade-off" not in words  # drawn as paths; the alt text has the words
    drawn = [attributes["aria-label"] for tag, attributes in reader.tags if tag == "svg"]
    assert len(drawn) == 3 and any("Trade-off, the paper's" in label for label in drawn)
    assert len(reader.ids) == len(set(reader.ids))
    for tag, attributes in reader.tags:
        if tag == "a" and attributes["href"].startswith("#"):
            assert attributes["href"][1:] in reader.ids
    assert "fig-motivation" not in text  # it has no results


def test_a_page_of_one_item(sparring, measured):
    assert sparring("report", measured / "results" / "fig-tiny", "--out", "one.html", "--title", "Mine").code == 0
    text, _ = page("one.html")
    assert "Figure 0" in text and "Table 0" not in text and "<h1>Mine</h1>" in text
    assert f"<code>sparring report {measured}/results/fig-tiny --out one.html --title Mine</code>" in text
    assert "What we find:" in text


def test_a_page_of_runs(sparring, evaluated, finished):
    assert sparring("report", finished, evaluated, "--strips", 1).code == 0
    text, reader = page()
    assert "2 runs compared" in text and "fat-run" in text
    for column in ("Natural", "FGSM", "PGD-20", "C&amp;W", "Worst case", "Natural (validation)"):
        assert f'data-column="{column}"' in text, column
    assert "fat on digits, tiny_cnn, 2 epochs, seed 0" in reader.text
    assert text.count('<figure class="strip"') == 1 and "PGD-2" in text
    assert sparring("report", evaluated, "--strips", 0).code == 0
    assert 'class="strip"' not in page()[0]


def test_the_page_gives_hardware_interruptions_and_validation_images(sparring, evaluated, finished, tmp_path):
    (start,) = run_folder.read_environment(finished)
    trained = f"trained on {start['device']}, {start['threads']} thread{'s' if start['threads'] > 1 else ''}"
    assert sparring("report", finished, "--strips", 0).code == 0
    words = page()[1].text
    assert words.count(f"Hardware {trained}") == 1 and "evaluated on" not in words and "resumed" not in words
    assert "eps 0.3, 120 validation images of digits, last epoch" in words and "(n = 120)" in words
    shared = {**start, "device": "NVIDIA H200", "threads": 1, "at_once": 4}
    for name, starts in (("same", [start, start]), ("moved", [start, shared, start]), ("bare", [])):
        folder = shutil.copytree(finished, tmp_path / "all" / name)
        (folder / run_folder.ENVIRONMENT).write_text(json.dumps(starts))
    assert sparring("report", "all", evaluated, "--strips", 0).code == 0
    words = page()[1].text
    assert f"same: {trained}, resumed once. " in words and f"fat-run: {trained}; evaluated on " in words
    assert f"moved: {trained} and NVIDIA H200, 1 thread, 4 processes at once, resumed 2 times. " in words
    assert "bare: trained on hardware that is not recorded. " in words


def test_missing_data_cost_only_the_strips(sparring, evaluated, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(evaluated, folder)
    doctor(folder, replaced(data="npz:gone.npz"))
    assert sparring("report", folder).code == 0
    assert "No attack is shown: no such file: gone.npz" in page()[1].text


def test_user_errors(sparring, tmp_path):
    sparring("report", "runs/nope").user_error("runs/nope does not exist")
    sparring("report").user_error("results does not exist", "sparring reproduce")
    (tmp_path / "results").mkdir()
    sparring("report").user_error("nothing to report in results", "sparring reproduce fig-motivation")
    (tmp_path / "odd").mkdir()
    sparring("report", "odd").user_error("neither a run nor results")
    (tmp_path / "results" / "table-tiny" / "limit20").mkdir(parents=True)
    sparring("report", "table-tiny").user_error("table-tiny does not exist", "sparring report results/table-tiny")
    fewer = sparring("report", "results/table-tiny")
    fewer.user_error("only results on fewer images (limit20)", "reproduce table-tiny.")
    sparring("report", "results", "--strips", -1).user_error("--strips")
    sparring("report", "results", "--out", tmp_path).user_error("is a folder", "report.html")


def test_a_damaged_result_is_left_out_and_reported(sparring):
    kept = Path(__file__).parents[2] / "results" / "fig-motivation" / "plane-lite-seed0.json"
    Path("results/fig-motivation").mkdir(parents=True)
    shutil.copy(kept, "results/fig-motivation")
    Path("results/fig-motivation/plane-lite-seed1.json").write_text("{")
    said = sparring("report")
    assert said.code == 0 and "left out: results/fig-motivation/plane-lite-seed1.json is damaged" in said.out
    assert "plane-lite-seed1.json is damaged" in Path("report.html").read_text()


def test_runs_are_named_by_what_differs(sparring, finished, tmp_path):
    runs = {
        "fat": "digits-tiny_cnn-fat-2-seed0-1a2b3c4d5e",
        "madry": "digits-tiny_cnn-madry-2-seed0-2a2b3c4d5e",
    }
    for folder in runs.values():
        shutil.copytree(finished, tmp_path / "all" / folder)
    assert sparring("report", "all", "all", "--strips", 0).code == 0
    text, reader = page()
    assert "2 runs compared" in text and "2 runs: fat, madry." in reader.text
    assert re.findall(r'<span class="name">(.*?)</span>', text) == list(runs)
    drawn = [attributes["aria-label"] for tag, attributes in reader.tags if tag == "svg"]
    assert drawn and not any("1a2b3c4d5e" in label for label in drawn)
    assert all(f"{name}: all/{folder}" in reader.text for name, folder in runs.items())  # with their folders


def fake_strips(monkeypatch, found):
    """Make `strips` return `found` by the folder's name; return the folders asked for."""
    asked = []

    def strips(folder, count, own=None):
        asked.append(folder.name)
        if isinstance(found[folder.name], UserError):
            raise found[folder.name]
        return found[folder.name][:count]

    monkeypatch.setattr("sparring.cli.report.strips", strips)
    return asked


def test_strips_are_of_the_most_robust_run_that_has_any(sparring, finished, tmp_path, monkeypatch):
    names = ["third", "first", "second"]
    for accuracy, name in zip((0.9, 0.2, 0.5), names, strict=True):
        folder = shutil.copytree(finished, tmp_path / "all" / name)
        doctor(folder, records=lambda records, pgd10=accuracy: [record.update(pgd10=pgd10) for record in records])
    gone = UserError("no such file: gone.npz.")
    asked = fake_strips(monkeypatch, {"first": [make_path()], "second": [], "third": gone})
    assert sparring("report", "all").code == 0
    assert asked == ["third", "second", "first"]
    text, reader = page()
    assert text.count('<figure class="strip"') == 1 and "The model is that of first, the most robust run" in reader.text
    assert "A more robust run could not be opened: no such file: gone.npz." in reader.text
    fake_strips(monkeypatch, {"first": [], "second": [], "third": gone})
    assert sparring("report", "all").code == 0
    text, reader = page()
    assert (
        '<figure class="strip"' not in text and reader.text.count("No attack is shown: no run with available data") == 1
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install it with: apt-get install -y chromium")
def test_a_browser_renders_the_page_on_a_desktop_and_on_a_phone(sparring, measured, evaluated, tmp_path):
    assert sparring("reproduce", "fig-motivation", "--results", tmp_path / "results").code == 0
    assert sparring("report", measured / "results", tmp_path / "results" / "fig-motivation", evaluated).code == 0
    # Both widths in one picture: headless Chromium's window cannot be as narrow as a phone.
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
        assert (page[:, -12:] < 120).mean() < 0.02  # nothing overflows at the right edge


def add_evaluation(folder, name, change):
    """Write a changed copy of the first evaluation."""
    source = folder / "evaluation" / "mart-eps0.3-limit40.json"
    facts = json.loads(source.read_text())
    change(facts)
    (folder / "evaluation" / f"{name}.json").write_text(json.dumps(facts))


def all_wrong(facts):
    for record in facts["records"]:
        record["accuracy"] = 0.0
        for one in record["runs"]:
            one["correct"] = "0" * len(one["correct"])


def test_every_way_of_measuring_has_its_own_row(evaluated, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    (own,) = methods(folder)
    assert own.measured == "eps 0.3, 40 images of digits, protocol mart"

    def smaller(facts):
        all_wrong(facts)
        for record in facts["records"]:
            record["eps"] = record["eps"] and 8 / 255
        facts["records"] = [record for record in facts["records"] if record["name"] != "fgsm"]

    def of_the_best(facts):
        all_wrong(facts)
        facts["about"]["which"] = "best"

    add_evaluation(folder, "mart-limit40", smaller)
    add_evaluation(folder, "mart-eps0.3-limit40-best", of_the_best)
    add_evaluation(folder, "mart-svhn-eps0.3-limit40", lambda facts: facts["about"].update(data="svhn"))
    rows = {row.measured: row.accuracies for row in methods(folder)}
    assert rows[own.measured] == own.accuracies
    assert rows["eps 8/255, 40 images of digits, protocol mart"] == dict.fromkeys(
        ("Natural", "PGD-20", "C&W", "Worst case"), 0.0
    )
    assert set(rows["eps 0.3, 40 images of digits, protocol mart, best checkpoint"].values()) == {0.0}
    assert rows["eps 0.3, 40 images of svhn, protocol mart"] == own.accuracies and len(rows) == 4


def test_doubts_are_on_the_page(sparring, evaluated, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    doubt = {"name": "square-beats-white-box", "why": "Gradients <mislead>.", "evidence": "5 of 40.", "page": "x"}
    add_evaluation(folder, "mart-eps0.3-limit40", lambda facts: facts.update(doubts=[doubt]))
    assert sparring("report", folder, "--strips", 0).code == 0
    text, reader = page()
    words = " ".join(reader.text.split())
    assert "Doubt about run (eps 0.3, 40 images of digits, protocol mart): square-beats-white-box: Gradients" in words
    assert "5 of 40." in words and "<mislead>" not in text
    assert "No number here was measured with AutoAttack" in words
    assert sparring("report", evaluated, "--strips", 0).code == 0
    assert "Doubt" not in page()[1].text


def test_a_page_of_a_folder_of_runs(sparring, evaluated, finished, tmp_path):
    for name, source in (("one", evaluated), ("two", finished)):
        shutil.copytree(source, tmp_path / "all" / name)
    assert sparring("report", "all", "--strips", 0).code == 0
    assert "2 runs compared" in page()[0]


def test_of_two_equal_evaluations_the_later_one_counts(evaluated, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    add_evaluation(folder, "a-later-one", all_wrong)
    (row,) = methods(folder)
    assert set(row.accuracies.values()) == {0.0}


def test_protocols_with_the_same_radius_keep_their_own_columns(sparring, evaluated, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    words = ["--protocol", "mart", "trades", "quick", "--limit", "20", "--no-doubts", "--device", "cpu"]
    assert evaluate([str(folder), *words]) == 0
    rows = {row.measured: row.accuracies for row in methods(folder)}
    assert list(rows["eps 8/255, 20 images of digits, protocols mart + quick"]) == [
        "Natural", "FGSM (mart)", "PGD-10", "PGD-20 (mart)", "C&W (mart)", "Worst case",
    ]  # fmt: skip
    assert "PGD-20 (trades)" in rows["eps 0.031, 20 images of digits, protocol trades"]


def test_many_columns_are_laid_out_as_a_grid(sparring, evaluated, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    assert sparring("report", folder, "--strips", 0).code == 0
    assert '<table class="results" ' in page()[0] and "★" not in page()[1].text  # one run: none is best
    words = ["--protocol", "figure", "tau", "trades", "--eps", "0.1", "--limit", "8", "--no-doubts", "--device", "cpu"]
    assert evaluate([str(folder), *words]) == 0
    assert sparring("report", folder, "--strips", 0).code == 0
    text = page()[0]
    assert '<table class="results many" ' in text and 'data-column="PGD-20, 2 eps"' in text


@pytest.mark.parametrize("order", [["figure", "figure-svhn"], ["figure-svhn", "figure"]])
def test_an_attack_that_two_protocols_share_is_shown_for_both(sparring, evaluated, tmp_path, order):
    """figure-svhn's PGD-20 at twice eps is figure's PGD-20."""
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder, ignore=shutil.ignore_patterns("evaluation"))
    assert evaluate([str(folder), "--protocol", *order, "--limit", "8", "--no-doubts", "--device", "cpu"]) == 0
    rows = {row.measured.partition(",")[0]: row.accuracies for row in methods(folder)}
    assert set(rows) == {"eps 4/255", "eps 8/255"}
    for accuracies in rows.values():
        assert {"FGSM", "PGD-20", "PGD-20, 2 eps", "PGD-100", "C&W"} <= {name.partition(" (")[0] for name in accuracies}


def test_stars_compare_only_numbers_measured_in_the_same_way():
    rows = [
        Method("a", "", {"Natural": 0.5, "PGD-20": 0.9}, 1.0, 1.0, [], "eps 0.1"),
        Method("a", "", {"Natural": 0.6, "PGD-20": 0.2}, 1.0, 1.0, [], "eps 0.3"),
    ]
    assert not any(cell.best for row in table(rows) for cell in row)
    other = Method("b", "", {"Natural": 0.4, "PGD-20": 0.3}, 2.0, 2.0, [], "eps 0.3")
    best = [(row[0].text, cell.column) for row in table([*rows, other]) for cell in row if cell.best]
    assert set(best) == {("60.0", "Natural"), ("40.0", "PGD-20"), *((n, "Mean BPs") for n in ("50.0", "60.0"))}


def test_a_bound_among_the_evaluations_is_ignored(sparring, evaluated, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    words = ["--limit", 10, "--strongest", "pgd", "--resamples", 100, "--device", "cpu"]
    assert sparring("bound", folder, *words).code == 0
    assert list((folder / "evaluation").glob("bound*.json"))
    said = sparring("report", folder, "--strips", 0)
    assert said.code == 0, said
    assert "PGD-20" in page()[0]
