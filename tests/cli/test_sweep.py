"""`sparring sweep`: every run is checked before the first begins, and the same command does what is missing."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from sparring.cli import launching, sweep_file
from sparring.cli import sweep as command
from sparring.launch import slurm
from sparring.training import run_folder
from tests.training.test_loop import same_run

from .conftest import QUICK, start

SWEEP = """
recipe = "fat-digits"
seeds = [0, 1]
out = "runs/tau"

[set]
epochs = 2
batch-size = 256
"attack.steps" = 2
tensorboard = false

[grid]
attack.tau = [0, 1]
"""
NAMES = [f"fat-digits-steps2-tau{tau}-epochs2-batch_size256-seed{seed}" for tau in (0, 1) for seed in (0, 1)]


class Killed(BaseException):
    """Raised where a process would be killed: nothing catches it, and nothing is saved."""


@pytest.fixture
def sweep(sparring, tmp_path):
    """`sparring sweep` with a file of this text."""

    def run(text: str, *words: object):
        (tmp_path / "tau.toml").write_text(text)
        return sparring("sweep", "tau.toml", *words)

    return run


def planned(text: str) -> list[sweep_file.Run]:
    Path("tau.toml").write_text(text)
    return sweep_file.runs(sweep_file.read(Path("tau.toml")))


def await_epoch(process, folders: list[Path]) -> None:
    """Wait until every folder has a finished epoch."""
    end = time.monotonic() + 60
    while not all(run_folder.read_metrics(folder) for folder in folders):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_combination_is_trained_once(sweep, sparring):
    said = sweep(SWEEP, "--plan")
    assert said.code == 0 and said.out.count("not started") == 4 and "4 runs in runs/tau" in said.out
    assert [line.split()[0] for line in said.out.splitlines()[1:5]] == NAMES and not Path("runs").exists()
    said = sweep(SWEEP)
    assert said.code == 0, said
    assert f"4 of 4: {NAMES[3]}" in said.out
    table = said.out.partition("Accuracy on validation images")[2]
    assert table and "tau0" in table and "seeds" in table  # as `sparring compare` prints it
    starts = [len(run_folder.read_environment(Path("runs/tau") / name)) for name in NAMES]
    said = sweep(SWEEP.replace("[0, 1]\n", "[0, 1, 3]\n").replace("seeds = [0, 1, 3]", "seeds = [0]"))
    assert (
        said.code == 0 and "already finished: 2 of 3 runs." in said.out and "1 of 1: fat-digits-steps2-tau3" in said.out
    )
    assert starts == [len(run_folder.read_environment(Path("runs/tau") / name)) for name in NAMES] == [1] * 4
    assert sparring("train", *QUICK, "--attack.tau", 1, "--seed", 1, "--out", "alone").code == 0
    same_run(Path("runs/tau") / NAMES[3], Path("alone"))


def test_the_same_command_continues_after_a_kill(sweep, sparring, monkeypatch):
    text = SWEEP.replace("epochs = 2", "epochs = 4").replace("seeds = [0, 1]", "seeds = [0]").replace("[0, 1]", "[1]")
    (folder,) = (run.folder for run in planned(text))
    record = run_folder.RunFolder.record

    def killed(self, metrics):
        if metrics["epoch"] == 3:
            raise Killed
        record(self, metrics)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(run_folder.RunFolder, "record", killed)
        sweep(text)
    assert re.search("at epoch [12] of 4", sweep(text, "--plan").out)  # the file of the second may not be written yet
    said = sweep(text)
    assert said.code == 0, said
    assert len(run_folder.read_environment(folder)) == 2
    assert sparring("train", *QUICK, "--attack.tau", 1, "--epochs", 4, "--out", "alone").code == 0
    same_run(folder, Path("alone"))


def test_ctrl_c_saves_all_processes_and_the_same_command_continues(sweep, tmp_path):
    text = SWEEP.replace("epochs = 2", "epochs = 12").replace("attack.tau = [0, 1]", "attack.tau = [1]")
    folders = [run.folder for run in planned(text)]
    process = start("sweep", "tau.toml", "--at-once", 2, cwd=tmp_path)
    await_epoch(process, folders)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped all processes; saved. Continue with: sparring sweep tau.toml --at-once 2" in err
    assert f"{folders[0].name}: epoch   1 " in out
    said = sweep(text, "--plan")
    assert said.out.count("at epoch") == 2


def test_ctrl_c_in_this_process_names_the_sweep(sweep, monkeypatch):
    kill = run_folder.RunFolder.record

    def record(self, metrics):
        kill(self, metrics)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_folder.RunFolder, "record", record)
    said = sweep(SWEEP)
    assert said.code == 130 and "; saved. Continue with: sparring sweep tau.toml\n" in said.err
    assert len(list(Path("runs/tau").iterdir())) == 1


def test_a_run_that_fails_does_not_end_the_others(sweep):
    text = SWEEP.replace("attack.tau = [0, 1]", "lr = [1e30, 0.1]").replace("seeds = [0, 1]", "seeds = [0]")
    said = sweep(text)
    assert said.code == 1 and "2 of 2: fat-digits-steps2-epochs2-batch_size256-lr0.1-seed0" in said.out
    assert "1 of 2 runs failed; fat-digits-steps2-epochs2-batch_size256-lr1e+30-seed0: the loss" in said.err
    assert "1 finished" in sweep(text, "--plan").out


def test_names_and_words(sparring):
    runs = planned(
        'recipe = ["trades-digits", "fat-digits"]\n[set]\nobjective = "fat-trades"\nnormalize = true\nattack.beta = 3\n'
        '[grid]\nattack.project = [true, false]\nlr = ["one-cycle:0.2"]\n'
    )
    assert len(runs) == 4 and len({run.folder for run in runs}) == 4
    assert all(run.folder.parent == Path("runs/sweeps/tau") for run in runs)
    words = runs[1].unit.words
    assert words[:2] == ("train", "trades-digits") and words[-1] == "--resume"
    assert {"--normalize", "--attack.no-project", "--lr=one-cycle:0.2", "--attack.beta=3", "--seed=0"} <= set(words)
    assert runs[1].config.objective.name == "fat-trades" and runs[1].config.normalize


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[grid]", "[grid", ["tau.toml is not TOML", "line"]),
        (
            'recipe = "fat-digits"',
            "",
            ["recipe must be the name of a recipe", "it is missing", 'recipe = "fat-digits"'],
        ),
        ('"fat-digits"', "3", ["recipe must be", "got 3"]),
        ('"fat-digits"', "[]", ["recipe must be", "got []"]),
        ('"fat-digits"', '"fat-digit"', ["unknown recipe 'fat-digit'", "Did you mean 'fat-digits'?"]),
        ("seeds =", "seed =", ["unknown key 'seed'", "Did you mean 'seeds'?"]),
        ("out =", "epochs = 3\nout =", ["unknown key 'epochs'", "below [set] or [grid]"]),
        ("[0, 1]\nout", "3\nout", ["seeds must be a list of whole numbers, got 3", "seeds = [0, 1, 2]"]),
        ("[0, 1]\nout", "[]\nout", ["seeds must be a list", "got []"]),
        ("[0, 1]\nout", "[0.5]\nout", ["seeds must be a list of whole numbers"]),
        ("[0, 1]\nout", "[-1]\nout", ["seeds: ", "-1"]),
        ('"runs/tau"', "3", ["out must be a folder, got 3"]),
        ("[set]", "[[set]]", ["set must be a table"]),
        ("[grid]", "[grid]\nepochs = [3]", ["epochs is in [set] and in [grid]"]),
        ("[0, 1]\n", "[]\n", ["got []"]),
        ("tau = [0, 1]", "tau = 1", ["[grid] attack.tau must be a list of values, got 1", "below [set]"]),
        ("tau = [0, 1]", "tau = []", ["[grid] attack.tau must be a list of values, got []"]),
        ("tau = [0, 1]", "tau = [[0]]", ["attack.tau = [0] must be text, a number, true or false"]),
        ("epochs = 2", "epochs = [2]", ["[set] epochs must be one value, got [2]", "below [grid]"]),
        ("epochs = 2", "epochs = 2020-01-01", ['epochs = "2020-01-01" must be text, a number']),
        ("epochs = 2", "epoch = 2", ["epoch = 2: ", "Did you mean --epochs?"]),
        ("epochs = 2", "epochs = 0", ["epochs = 0: epochs must be at least 1"]),
        ("epochs = 2", 'epochs = "many"', ['epochs = "many": ', "not a whole number"]),
        ("epochs = 2", "epochs = 2\nseed = 3", ["seed does not belong below [set]", "seeds = [0, 1]"]),
        ("epochs = 2", "epochs = 2\nresume = true", ["resume does not belong", "resumes what was interrupted"]),
        ("epochs = 2", 'epochs = 2\nmodel = "resnet"', ['model = "resnet": unknown model', "'resnet18'"]),
        ("epochs = 2", 'epochs = 2\nmodel = "no.such:net"', ['model = "no.such:net": ']),
        ("epochs = 2", 'epochs = 2\ndata = "digit"', ['data = "digit": unknown data source', "'digits'"]),
        ("epochs = 2", 'epochs = 2\ndata = "folder:none"', ['data = "folder:none": no such folder']),
        ("epochs = 2", "epochs = 2\nvalidation = 5000", ["validation = 5000: cannot hold out 5000 of 1347"]),
        ("tau = [0, 1]", "tau = [0, -1]", ["attack.tau = -1: "]),
        ("tau = [0, 1]", "tau = [1, 1.0]", ["the same run twice", "tau1"]),
        ("attack.tau = [0, 1]", "attack.beta = [1]", ["attack.beta = 1: fat does not read --attack.beta"]),
        ("attack.tau = [0, 1]", 'attack.norm = ["l2"]', ['attack.norm = "l2": ', "--attack.eps 0.5"]),
        ("attack.tau = [0, 1]", "epoch = [3]\nlrr = [3]", ["epoch = 3: ", "--epochs"]),
        (
            "attack.tau = [0, 1]",
            "tensorboard = [true, false]",
            ["tensorboard does not change what is computed", "[set]"],
        ),
        ('"fat-digits"', '["fat-digits", "madry-digits"]', ["attack.tau = 0 in madry-digits: madry does not read"]),
    ],
)
def test_a_wrong_file_is_one_line(sweep, old, new, expected):
    assert old in SWEEP
    sweep(SWEEP.replace(old, new, 1)).user_error("tau.toml", *expected)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--at-once", 0], ["--at-once must be at least 1 process, got 0"]),
        (["--launcher", "slrum"], ["--launcher", "slrum"]),
        (
            ["--launcher", "slurm", "--at-once", 2],
            ["--at-once 2 is for processes of this machine", "--slurm.at-most 2"],
        ),
        (["--wait"], ["--wait is for jobs of a cluster", "Leave it out"]),
        (["--slurm.at-most", 2], ["--slurm.at-most is for jobs of a cluster", "--launcher slurm"]),
        (["--slurm.time", 0], ["slurm.time must be at least 1 minute, got 0"]),
        (["--device", "gpu"], ["unknown device 'gpu'"]),
    ],
)
def test_wrong_flags_are_one_line(sweep, words, expected):
    sweep(SWEEP, *words).user_error(*expected)
    assert not list(Path().rglob("config.json"))


def test_no_file(sparring):
    sparring("sweep", "none.toml").user_error("there is no file none.toml", "--help")
    sparring("sweep").user_error("missing", "FILE")


def test_a_folder_with_another_run_is_refused(sweep, sparring):
    folder = Path("runs/tau") / NAMES[0]
    assert sparring("train", *QUICK, "--epochs", 1, "--out", folder).code == 0
    sweep(SWEEP).user_error(f"{folder} holds another run", "epochs 1 -> 2", "out")


def test_jobs_are_submitted_once_and_awaited(sweep, sparring, monkeypatch):
    """With a stand-in for Slurm: what it starts has ended when the queue is looked at next."""
    submitted, queue = [], {}

    def sbatch(commands, folder, asked, name):
        numbers = [f"5_{len(submitted) + number}" for number in range(len(commands))]
        submitted.extend(commands)
        queue.update(dict.fromkeys(numbers, "pending"))
        return numbers

    monkeypatch.setattr(slurm, "check_here", lambda: None)
    monkeypatch.setattr(slurm, "_sbatch", sbatch)
    for module in (slurm, launching, command):
        monkeypatch.setattr(module, "states", lambda numbers: {n: queue[n] for n in numbers if n in queue})
    text = SWEEP.replace("attack.tau = [0, 1]", "attack.tau = [1]")
    said = sweep(text, "--launcher", "slurm")
    assert said.code == 0 and "submitted: 2 as job 5" in said.out and "5_1  fat-digits-steps2-tau1" in said.out
    assert "logs: runs/tau/slurm    state: squeue --me    cancel: scancel 5" in said.out
    assert [words[:3] for words in submitted] == [["-m", "sparring", "train"]] * 2
    assert "not started, job 5_1 pending" in sweep(text, "--launcher", "slurm", "--plan").out
    assert "already in the queue: 2 of 2" in sweep(text, "--launcher", "slurm").out and len(submitted) == 2
    for words in submitted[:1]:
        assert sparring(*words[2:]).code == 0
    queue.clear()
    monkeypatch.setattr(slurm, "_sbatch", lambda *given: ["6"])  # which ends at once, without a result
    said = sweep(text, "--launcher", "slurm", "--wait")
    assert said.code == 1 and "already finished: 1 of 2 runs." in said.out and "0 of 1 finished" in said.out
    said.one_line("1 of 1 jobs ended without a result", "See runs/tau/slurm/6_0_log.err", "submits them again")
