"""`sparring reproduce` on digits."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparring.cli import arguments, reproduce
from sparring.cli.signals import breakable
from sparring.paper import headline, plan, specs
from sparring.paper.collect import collect
from sparring.paper.specs.figures import FIG_EPS
from sparring.training import run_folder
from tests.paper.test_collect import copy
from tests.paper.tiny import COURSE, TABLE

TABLE1 = specs.find("table1")
ITEMS = {item.name: item for item in (TABLE, COURSE, specs.find("fig-motivation"))}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Replace the items by ones that take seconds."""
    monkeypatch.setattr(specs, "ITEMS", ITEMS)


def test_the_list_of_items(sparring):
    said = sparring("reproduce")
    assert said.code == 0
    for name in ITEMS:
        assert name in said.out
    assert "0/2" in said.out and "0/1" in said.out and "sparring reproduce ITEM" in said.out


def test_from_training_to_the_table(sparring):
    said = sparring("reproduce", "table-tiny")
    assert said.code == 0, said
    assert "wrote results/table-tiny/fat-lite-seed0.json" in said.out
    assert "wrote results/table-tiny/table.md" in said.out
    assert "89.34 ± 0.22" in said.out and "Tiny CNN, 2 epochs, 1 seed" in said.out and "n = 450 test images" in said.out
    assert "2/2" in sparring("reproduce").out
    result = json.loads(Path("results/table-tiny/fat-lite-seed0.json").read_text())
    assert f"{100 * result['found']['attacks']['pgd10']['accuracy']:.2f}" in said.out
    again = sparring("reproduce", "table-tiny")
    assert "training" not in again.out and "seed0.json" not in again.out and again.code == 0
    # Results are enough to draw; another folder has its own.
    Path("results/table-tiny/table.md").unlink()
    runs = sorted(Path("runs").rglob("*"))
    assert sparring("reproduce", "table-tiny", "--draw").code == 0
    assert Path("results/table-tiny/table.md").exists() and sorted(Path("runs").rglob("*")) == runs
    assert (
        "Nothing of table-tiny is measured yet" in sparring("reproduce", "table-tiny", "--draw", "--results", "r").out
    )
    # A result on fewer images uses the same run and has its own folder.
    table = Path("results/table-tiny/table.md").read_text()
    said = sparring("reproduce", "table-tiny", "--limit", 16)
    assert "training" not in said.out and "n = 16 test images" in said.out
    assert (
        Path("results/table-tiny/limit16/table.md").exists()
        and Path("results/table-tiny/table.md").read_text() == table
    )


def test_draw_without_an_item_draws_everything(sparring, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(headline, "ROWS", {"table-tiny": ("madry", "fat")})
    shutil.copytree(measured / "results", tmp_path / "results")
    said = sparring("reproduce", "--draw")
    assert said.code == 0, said
    for name in ("table-tiny/table.md", "fig-tiny/fig-tiny.png", "headline.md"):
        assert f"wrote results/{name}\n" in said.out and (tmp_path / "results" / name).exists()
    assert "fig-motivation" not in said.out
    sparring("reproduce", "--draw", "--results", "none").user_error(
        "no results in none", "sparring reproduce fig-motivation"
    )


def test_a_figure_is_reproduced_once(sparring):
    said = sparring("reproduce", "fig-motivation")
    assert said.code == 0 and "wrote results/fig-motivation/fig-motivation.png" in said.out
    assert "Amid the other class" in " ".join(said.out.split()) and "already measured" not in said.out
    assert "What we find: confirmed" in said.out and "Seed 0, the only one measured." in " ".join(said.out.split())
    again = sparring("reproduce", "fig-motivation")
    assert "already measured: 1 of 1 job, in results/fig-motivation. Nothing is run" in again.out


def test_time_is_up_and_the_same_command_continues(sparring, monkeypatch):
    words = ("reproduce", "table-tiny", "--rows", "fat", "--limit", 16, "--max-minutes", 100)
    now = iter([*([0.0] * 5), *([1e6] * 1000)])  # the time is up after a few steps
    with monkeypatch.context() as patched:
        patched.setattr(reproduce.time, "monotonic", lambda: next(now))
        said = sparring(*words)
    assert said.code == 0, said
    assert "Time is up with 1 of 1 job left. The same command continues." in said.out
    assert "measured yet" not in said.out and "0 min" not in said.out
    assert not list(Path("results").rglob("*.json"))  # without an epoch there is no result
    said = sparring(*words)
    assert said.code == 0 and "Time is up" not in said.out
    assert "training table-tiny" in said.out  # not resuming: no epoch was finished
    assert json.loads(Path("results/table-tiny/limit16/fat-lite-seed0.json").read_text())["state"] == "measured"
    (folder,) = Path("runs/paper").iterdir()
    assert len(run_folder.read_environment(folder)) == 2


def test_an_interrupted_run_resumes_and_says_from_where(sparring, monkeypatch):
    said = []
    monkeypatch.setattr("sparring.training.signals._received", [signal.SIGTERM])  # not Ctrl-C
    real = reproduce.carry_out

    def stop_after_an_epoch(jobs, workspace):
        workspace.stop = lambda: len(run_folder.read_metrics(jobs[0].folder)) == 1
        return real(jobs, workspace)

    with monkeypatch.context() as patched:
        patched.setattr(reproduce, "carry_out", stop_after_an_epoch)
        said.append(sparring("reproduce", "table-tiny", "--rows", "fat"))
    begun = json.loads(Path("results/table-tiny/fat-lite-seed0.json").read_text())
    assert begun["state"] == "interrupted" and len(begun["history"]["epoch"]) == 1
    drawn = " ".join(sparring("reproduce", "table-tiny", "--draw").out.split())
    assert "1 of 2 epochs" in drawn and "Nothing of table-tiny is measured yet" in drawn
    said.append(sparring("reproduce", "table-tiny", "--rows", "fat"))
    assert said[0].out.startswith("training table-tiny fat") and said[0].code == 1
    assert said[1].out.startswith("resuming after epoch 1: table-tiny fat") and said[1].code == 0


def test_the_time_limit_interrupts_a_measurement():
    with pytest.raises(KeyboardInterrupt), breakable(time.monotonic() + 0.05):
        time.sleep(30)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    handler = signal.getsignal(signal.SIGINT)
    with breakable(float("inf")):
        assert signal.getsignal(signal.SIGINT) is not handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_prints_the_command_that_continues(sparring, monkeypatch):
    def stop(jobs, workspace):
        raise reproduce.Stopped("in x: stopped in epoch 1 after step 2; saved")

    monkeypatch.setattr(reproduce, "carry_out", stop)
    said = sparring("reproduce", "table-tiny", "--seeds", 3)
    assert said.code == 1
    said.one_line("stopped in x", "Continue with: sparring reproduce table-tiny --seeds 3")


WITH_TINY_ITEMS = """
import sys
from sparring.cli import main
from sparring.paper import specs
from sparring.paper.specs.figures import FIG_EPS
from tests.paper.tiny import TABLE
specs.ITEMS = {TABLE.name: TABLE}
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def commands_run(monkeypatch):
    """Let the processes know the items of this file; return the commands that were run."""
    real, ran = reproduce.run_together, []
    program = [sys.executable, "-m", "sparring"]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)

    def run_together(commands, **given):
        assert all(words[:3] == program for words in commands)
        ran.extend(words[3:] for words in commands)
        return real([[sys.executable, "-c", WITH_TINY_ITEMS, *words[3:]] for words in commands], **given)

    monkeypatch.setattr(reproduce, "run_together", run_together)
    return ran


def test_several_processes_give_the_results_of_one(sparring, commands_run, measured):
    said = sparring("reproduce", "table-tiny", "--at-once", 3)
    assert said.code == 0, said
    assert len(commands_run) == 2  # two rows to share
    assert (
        said.out.count("table.md") == 1 and "fat seed 0 epoch   2" in said.out and "madry seed 0 epoch   2" in said.out
    )
    for row in ("fat", "madry"):
        name = f"table-tiny/{row}-lite-seed0.json"
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (Path("results"), measured / "results"))
        for attack, record in theirs["found"]["attacks"].items():
            assert ours["found"]["attacks"][attack]["accuracy"] == record["accuracy"]
        assert ours["history"]["loss"] == theirs["history"]["loss"]
    again = sparring("reproduce", "table-tiny", "--at-once", 3)
    assert again.code == 0 and len(commands_run) == 2 and "already measured: 2 of 2 jobs" in again.out


def test_a_failing_process_is_reported(sparring, commands_run):
    Path("results").touch()  # a file where a folder is needed
    sparring("reproduce", "table-tiny", "--rows", "fat", "--at-once", 2).user_error("results")


def test_stopped_processes_print_the_whole_command(sparring, monkeypatch):
    shares = []
    monkeypatch.setattr(reproduce, "run_together", lambda *args, share, **given: shares.append(share))
    said = sparring("reproduce", "table-tiny", "--at-once", 2, "--share", 40)
    assert said.code == 1 and shares == [40]
    said.one_line("stopped all processes; saved. Continue with: sparring reproduce table-tiny --at-once 2 --share 40")


def test_without_a_table_there_is_no_headline(sparring, measured, monkeypatch):
    monkeypatch.setattr(headline, "ROWS", {"table-tiny": ("madry", "fat")})
    shutil.copytree(measured / "results" / "fig-tiny", "results/fig-tiny")
    said = sparring("reproduce", "--draw")
    assert said.code == 0 and "results/headline.md is not written" in said.out


def test_a_table_fits_a_narrow_screen(sparring, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(specs, "ITEMS", {"table1": TABLE1})
    said = sparring("reproduce", "table1", "--draw")
    assert "AutoAttack" not in said.out.partition("paper takes")[0] and "BPs" not in said.out  # columns without numbers
    for part in ("FAT 16/255", "Natural", "PGD-100", "89.34", "± 0.22", "± 0.53"):
        assert part in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "120")
    assert "89.34 ± 0.22" in sparring("reproduce", "table1", "--draw").out


@pytest.mark.parametrize("columns", [40, 60, 72])
def test_on_a_narrow_screen_no_name_and_no_number_is_cut(sparring, monkeypatch, measured, columns):
    shutil.copytree(measured / "results", "results")
    monkeypatch.setenv("COLUMNS", str(columns))
    long = replace(TABLE.rows[1], label="FAT for TRADES 16/255")
    item = replace(
        TABLE, rows=(TABLE.rows[0], long), columns={f"{name} accuracy": a for name, a in TABLE.columns.items()}
    )
    monkeypatch.setitem(ITEMS, "table-tiny", item)
    said = sparring("reproduce", "table-tiny", "--draw").out
    table = said.partition("Lite scale")[0]
    assert "…" not in table and max(map(len, table.splitlines())) <= columns
    (found,) = collect(item, Path("results")).found["fat", "lite"]
    natural = 100 * found["found"]["attacks"]["natural"]["accuracy"]
    assert f"{natural:.2f}" in table and "FAT for" in table and "16/255" in table and "BPs" in table


def test_the_plan_lists_the_jobs(sparring):
    assert "1 job " in sparring("reproduce", "table-tiny", "--plan", "--rows", "fat").out
    said = sparring("reproduce", "table-tiny", "--plan", "--seeds", 0, 1)
    assert said.code == 0 and said.out.count("missing") == 4 and "4 jobs" in said.out and not Path("runs").exists()


def test_the_plan_never_cuts_names(sparring, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setitem(ITEMS, "fig-eps", FIG_EPS)
    words = {word for line in sparring("reproduce", "fig-eps", "--plan").out.splitlines() for word in line.split()[:1]}
    assert {row.name for row in FIG_EPS.rows if "lite" in row.configs} <= words


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["table-tinny"], ["unknown item 'table-tinny'", "Did you mean 'table-tiny'?"]),
        (["table-tiny", "--scale", "huge"], ["--scale", "lite", "full"]),
        (["table-tiny", "--rows", "fta"], ["no row 'fta'", "Did you mean 'fat'?"]),
        (["fig-tiny", "--scale", "full"], ["nothing at scale full", "--scale lite"]),
        (["table-tiny", "--limit", "0"], ["--limit", "at least 1"]),
        (["table-tiny", "--max-minutes", "0"], ["--max-minutes", "above 0"]),
        (["table-tiny", "--at-once", "0"], ["--at-once", "at least 1"]),
        (["table-tiny", "--at-once", "2", "--share", "0"], ["--share", "1 to 100", "got 0"]),
        (["table-tiny", "--share", "50"], ["--share 50", "Give --at-once"]),
        (["fig-motivation", "--limit", "5"], ["--limit is for items that measure accuracy", "Leave it out"]),
        (["table-tiny", "--plan", "--draw"], ["Give one of them"]),
        (["table-tiny", "--seeds", "-1"], ["a seed must be a whole number from 0"]),
        (["table-tiny", "--device", "tpu"], ["unknown device 'tpu'"]),
        (["table-tiny", "--result", "x"], ["--results"]),
        (["--rows", "fat"], ["--rows needs an item", "sparring reproduce ITEM --rows"]),
        (["--rows", "fat", "table-tiny"], ["the item goes first: sparring reproduce table-tiny --rows"]),
        (["table-tiny", "--runs", "/proc/runs"], ["cannot create the folder /proc/runs", "Choose another with --runs"]),
        (
            ["fig-motivation", "--results", "/proc/none"],
            ["cannot create the folder /proc/none", "Choose another with --results"],
        ),
        (["--plan"], ["--plan needs an item"]),
        (["--draw", "--max-minutes", "5"], ["--max-minutes needs an item"]),
    ],
)
def test_user_errors(sparring, words, parts):
    sparring("reproduce", *words).user_error(*parts)


def test_missing_data_and_a_missing_gpu_are_user_errors(sparring, monkeypatch, tmp_path):
    large = {"data": "cifar10", "model": "resnet18", "epochs": 30}
    rows = tuple(replace(row, configs={"full": replace(row.configs["lite"], **large)}) for row in TABLE.rows)
    monkeypatch.setitem(ITEMS, "table-tiny", replace(TABLE, rows=rows))
    monkeypatch.setenv("SPARRING_DATA", str(tmp_path))
    on_a_cpu = sparring("reproduce", "table-tiny", "--scale", "full", "--device", "cpu")
    on_a_cpu.user_error("needs cifar10", "sparring data fetch cifar10")
    if not torch.cuda.is_available():  # checked first, so that no data are fetched in vain
        said = sparring("reproduce", "table-tiny", "--scale", "full")
        said.user_error("needs a GPU", "--device cpu", "minutes: sparring reproduce fig-tiny;")
        assert "--scale lite" not in said.err and "--rows" not in said.err  # these would be refused as well
        (estimate,) = re.findall(r"about (.*?) on an H200", said.err)
        assert f"{estimate} in all" in sparring("reproduce", "table-tiny", "--scale", "full", "--plan").out
        mixed = [replace(rows[0], configs={"full": TABLE.rows[0].configs["lite"]}), rows[1]]
        monkeypatch.setitem(ITEMS, "table-tiny", replace(TABLE, rows=tuple(mixed)))
        sparring("reproduce", "table-tiny", "--scale", "full").user_error("here with --rows madry;")
        both = [replace(row, configs={**row.configs, **TABLE.rows[0].configs}) for row in rows]
        monkeypatch.setitem(ITEMS, "table-tiny", replace(TABLE, rows=tuple(both)))
        sparring("reproduce", "table-tiny", "--scale", "full").user_error("here with --scale lite;")
    assert not Path("runs").exists()


def test_hours_on_a_cpu_are_announced(sparring, monkeypatch):
    monkeypatch.setattr(reproduce.cost, "on_a_cpu", lambda jobs: 7200.0 if list(jobs) else 0.0)
    said = sparring("reproduce", "table-tiny", "--rows", "fat", "--device", "cpu")
    assert said.out.startswith("note: on a CPU this takes about 2 h\ntraining table-tiny fat")


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(sparring, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: "table-tiny" not in str(path))
    sparring("reproduce", "table-tiny").user_error(
        "the folder results/table-tiny is not writable", "Choose another with --results"
    )


def test_a_result_with_another_declaration_is_reported_and_kept(sparring, measured):
    copy(measured, Path(), state="diverged", config=None)
    said = sparring("reproduce", "table-tiny", "--rows", "fat")
    assert "has another declaration than the current one: kept as fat-lite-seed0.json.old" in " ".join(said.out.split())
    assert json.loads(Path("results/table-tiny/fat-lite-seed0.json.old").read_text())["state"] == "diverged"


def test_a_job_without_training_is_not_listed_as_trained(sparring):
    said = sparring("reproduce", "fig-motivation", "--plan")
    assert "missing" in said.out and "trained" not in said.out


def test_a_damaged_result_is_reported(sparring):
    Path("results/table-tiny").mkdir(parents=True)
    Path("results/table-tiny/fat-lite-seed0.json").write_text("{")
    text = "fat-lite-seed0.json is damaged: it is not JSON. Move it away"
    for words in (["table-tiny", "--draw"], []):  # the other results are shown
        assert text in " ".join(sparring("reproduce", *words).out.split())
    sparring("reproduce", "table-tiny").user_error(text)  # before any training


def test_flags_that_would_be_ignored_are_refused(sparring):
    sparring("reproduce", "table-tiny", "--draw", "--rows", "fat").user_error("Leave out --rows and --seeds")
    sparring("reproduce", "table-tiny", "--draw", "--seeds", "1").user_error("Leave out --rows and --seeds")
    sparring("reproduce", "table-tiny", "--draw", "--scale", "full").user_error(
        "nothing of table-tiny is measured at scale full", "sparring reproduce table-tiny --draw"
    )
    planned = sparring("reproduce", "table-tiny", "--plan", "--seeds", "1", "1").out
    assert "2 jobs" in planned  # each seed counts once
    Path("file").touch()
    for flag in ("--results", "--runs"):
        sparring("reproduce", "table-tiny", flag, "file").user_error("file is a file", flag)


def test_a_drawing_can_be_of_the_requested_scale(sparring, measured):
    """Both rows are measured at lite, one of them at full as well."""
    shutil.copytree(measured / "results", "results")
    copy(measured, Path(), scale="full")
    for words, epochs in ((["--scale", "full"], 3), ([], 2)):
        said = sparring("reproduce", "table-tiny", "--draw", *words).out
        assert f"Ours: Tiny CNN, {epochs} epochs" in said


def test_jobs_of_a_cluster_are_the_training_runs(sparring, monkeypatch, measured):
    """Rows that share a run are one job; what is measured needs none; the jobs' commands name exactly their rows."""
    handed = []

    def hand_in(units, folder, asked, *, name, tell):
        handed.append((units, folder, asked, name))

    monkeypatch.setattr(reproduce, "hand_in", hand_in)
    said = sparring("reproduce", "table-tiny", "--launcher", "slurm", "--seeds", 0, 1, "--slurm.partition", "gpu")
    assert said.code == 0 and "sparring reproduce table-tiny --draw draws what is measured." in said.out
    ((units, folder, asked, name),) = handed
    assert folder == Path("runs/paper/slurm") and asked.partition == "gpu" and name == "table-tiny"
    assert len(units) == 4 and len({unit.name for unit in units}) == 4  # two rows, two seeds
    for unit in units:
        assert unit.words[:3] == ("reproduce", "table-tiny", "--no-show") and "--launcher" not in unit.words
        given = arguments.parse(reproduce.Options, list(unit.words[1:]), prog="", description="")
        assert len(given.rows) == len(given.seeds) == 1 and given.device == "auto"
    shutil.copytree(measured / "results", "results", dirs_exist_ok=True)
    said = sparring("reproduce", "table-tiny", "--launcher", "slurm")
    assert said.code == 0 and len(handed) == 1 and "already measured: 2 of 2 jobs" in said.out
    assert "wrote results/table-tiny/table.md" in said.out


def test_rows_that_share_a_run_are_one_job():
    jobs = plan(TABLE1, scale="full", runs_folder=Path("runs"), results_folder=Path("results"))
    shared = [*jobs, *(replace(job, row=replace(job.row, name="same")) for job in jobs[:2])]
    groups = reproduce._by_run(shared)
    assert len(groups) == len({job.folder for job in jobs}) < len(shared)
    assert [len({job.seed for job in group}) for group in groups.values()] == [1] * len(groups)
    assert sum(len(group) for group in groups.values()) == len(shared)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--at-once", 2], ["--at-once 2 is for processes of this machine", "--slurm.at-most 2"]),
        (["--draw"], ["--draw draws existing results here", "Leave out --launcher slurm"]),
        (["--max-minutes", 5], ["--max-minutes is for work on this machine", "--slurm.time"]),
        (["--slurm.gpus", 2], ["takes one GPU, got --slurm.gpus 2"]),
    ],
)
def test_flags_that_jobs_do_not_read(sparring, words, expected):
    sparring("reproduce", "table-tiny", "--launcher", "slurm", *words).user_error(*expected)
