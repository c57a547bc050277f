"""Against a real Slurm, two nodes on the loopback: runs that are requeued in the middle end as if left alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.cli import launching, main, sweep_file
from sparring.launch.slurm import log_of
from sparring.training import run_folder
from tests.launch.cluster import MISSING, Cluster, slurm, until
from tests.training.test_loop import same_run

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING[:3])} not installed: apt-get install slurm-wlm munge"
)
SWEEP = """
recipe = "fat-digits"
seeds = [0, 1]
out = "runs"
[set]
epochs = 6
batch_size = 256
attack.steps = 2
tensorboard = false
"""
SETTINGS = ["--epochs=6", "--batch-size=256", "--attack.steps=2", "--no-tensorboard"]
SLURM = ("--launcher", "slurm", "--slurm.gpus", 0, "--slurm.time", 5)
PATIENCE = 60.0  # seconds, for what a job computes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm() as running:
        yield running


@pytest.fixture
def on_slurm(sparring, cluster, monkeypatch):
    """The command with the cluster's environment; its jobs end with the test, or in time."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setattr(launching, "_LOOK", 0.5)
    late = threading.Timer(3 * PATIENCE, cluster.cancel)  # then a wait for them ends, too
    late.start()
    yield sparring
    late.cancel()
    cluster.cancel()


def trained(folder: Path) -> int:
    """Epochs that a run has recorded."""
    return len(run_folder.read_metrics(folder))


def logs(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("*_log.*")))


def test_requeued_runs_end_as_if_left_alone(on_slurm, cluster, tmp_path):
    Path("sweep.toml").write_text(SWEEP)
    said = on_slurm("sweep", "sweep.toml", *SLURM)
    assert said.code == 0, said
    array = re.search(r"submitted: 2 as job (\d+)\n", said.out)[1]
    again = on_slurm("sweep", "sweep.toml", *SLURM)
    assert again.code == 0 and "already in the queue: 2 of 2" in again.out and "submitted" not in again.out
    runs = [run.folder for run in sweep_file.runs(sweep_file.read(Path("sweep.toml")))]

    def about() -> str:
        return logs(tmp_path / "runs" / "slurm") + cluster.logs()

    # One is requeued as a pre-empting job would, the other is told that its time is nearly up.
    for number, disturb in enumerate((("scontrol", "requeue"), ("scancel", "--signal=USR1"))):
        until(lambda run=runs[number]: trained(run) >= 1, f"an epoch of run {number}", PATIENCE, logs=about)
        assert trained(runs[number]) < 6
        cluster.run(*disturb, f"{array}_{number}")
    alone = [tmp_path / "alone" / str(seed) for seed in range(2)]
    for seed, folder in enumerate(alone):  # while the jobs wait
        assert main(["train", "fat-digits", *SETTINGS, f"--seed={seed}", f"--out={folder}"]) == 0
    said = on_slurm("sweep", "sweep.toml", *SLURM, "--wait")
    assert said.code == 0, f"{said}\n{about()}"
    assert "2 of 2 finished, 0 running, 0 queued" in said.out and "best PGD-10" in said.out
    assert [len(run_folder.read_environment(run)) for run in runs] == [2, 2], about()
    for run, folder in zip(runs, alone, strict=True):
        same_run(run, folder)
    assert all("best: epoch" in log_of(f"{array}_{number}", Path("runs/slurm")).read_text() for number in (0, 1))


def test_a_figure_is_reproduced_by_jobs(on_slurm, cluster, tmp_path):
    said = on_slurm("reproduce", "fig-motivation", *SLURM, "--wait")
    assert said.code == 0, f"{said}\n{logs(tmp_path / 'runs/paper/slurm')}{cluster.logs()}"
    number = re.search(r"submitted: 1 as job (\d+)\n", said.out)[1]
    assert "wrote results/fig-motivation/" in log_of(number, Path("runs/paper/slurm")).read_text()
    assert "1 of 1 finished" in said.out and "wrote results/fig-motivation/fig-motivation.png" in said.out


def test_what_slurm_refuses_is_one_line(on_slurm):
    Path("sweep.toml").write_text(SWEEP)
    words = ("sweep", "sweep.toml", "--launcher", "slurm")
    on_slurm(*words, "--slurm.gpus", 0, "--slurm.partition", "none").user_error("partition", "sinfo")
    on_slurm(*words).user_error("sbatch refused the jobs", "--slurm.gpus 0")
