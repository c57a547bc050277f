"""Submission through submitit to stand-ins for Slurm's commands: arrays, flags, and nothing submitted twice."""

from __future__ import annotations

import json
import os
import pickletools
from pathlib import Path

import pytest

from sparring.errors import UserError
from sparring.launch import Unit, slurm
from sparring.launch.slurm import Slurm, submit

pytest.importorskip("submitit", reason="pip install 'sparring[slurm]'")
UNITS = [Unit(name, ("train", "fat-digits", f"--out={name}", "--resume")) for name in ("a", "b")]
# Each keeps its words; sbatch counts, and squeue prints a file. `fails` lets them fail with its text.
STAND_IN = """#!/bin/sh
cd "{folder}"
echo "$(basename $0) $@" >> calls
if [ -s fails ]; then cat fails >&2; exit 1; fi
case "$(basename $0)" in
  sbatch) cp "$1" script; echo x >> count; echo "Submitted batch job $(wc -l < count)" ;;
  squeue) cat queue ;;
esac
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """A folder with stand-ins for Slurm's commands, first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "srun"):
        (folder / name).write_text(STAND_IN.format(folder=folder))
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    (folder / "calls").touch()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_units_become_an_array(cluster, tmp_path):
    asked = Slurm(partition="gpu", time=30, cpus=4, mem="16G", at_most=3, extra=("account=lab", "exclusive"))
    found = submit(UNITS, tmp_path / "slurm", asked, name="tau")
    assert found.new == {"a": "1_0", "b": "1_1"} and not found.queued
    assert json.loads((tmp_path / "slurm" / "jobs.json").read_text()) == found.new
    lines = (cluster / "script").read_text().splitlines()
    for flag in (
        "partition=gpu",
        "time=30",
        "cpus-per-task=4",
        "mem=16GB",
        "gpus-per-node=1",
        "array=0-1%2",
        "requeue",
    ):
        assert f"#SBATCH --{flag}" in lines or f"#SBATCH --{flag.removesuffix('B')}" in lines, flag
    for flag in ("account=lab", "exclusive", "job-name=tau", "open-mode=append", "signal=USR2@90"):
        assert f"#SBATCH --{flag}" in lines, flag


def test_what_is_pickled_is_a_name_and_words(cluster, tmp_path):
    submit(UNITS, tmp_path, Slurm(), name="tau")
    stored = (tmp_path / "1_1_submitted.pkl").read_bytes()
    texts = [value for _, value, _ in pickletools.genops(stored) if isinstance(value, str)]
    assert {"sparring.launch.job", "work", "-m", "sparring", *UNITS[1].words} <= set(texts)
    assert not any("torch" in text for text in texts)


def test_a_run_on_several_gpus_is_started_by_torchrun(cluster, tmp_path):
    submit(UNITS[:1], tmp_path, Slurm(gpus=4), name="tau")
    stored = (tmp_path / "1_submitted.pkl").read_bytes()
    texts = [value for _, value, _ in pickletools.genops(stored) if isinstance(value, str)]
    assert {"torch.distributed.run", "--nproc-per-node", "4"} <= set(texts)


def test_nothing_is_submitted_twice(cluster, tmp_path):
    submit(UNITS, tmp_path, Slurm(), name="tau")
    (cluster / "queue").write_text("1_0 RUNNING\n1_1 PENDING\n7 RUNNING\n")
    again = submit(UNITS, tmp_path, Slurm(), name="tau")
    assert not again.new and again.queued == {"a": "1_0", "b": "1_1"}
    (cluster / "queue").write_text("1_0 RUNNING\n")  # the other has ended, without its result
    third = submit(UNITS, tmp_path, Slurm(), name="tau")
    assert third.new == {"b": "2"} and third.queued == {"a": "1_0"}
    assert slurm.submitted(tmp_path) == {"a": "1_0", "b": "2"}
    assert sum(line.startswith("sbatch") for line in (cluster / "calls").read_text().splitlines()) == 2


def test_states_are_those_of_the_queue(cluster):
    (cluster / "queue").write_text("1_0 RUNNING\n1_1 PENDING\n")
    assert slurm.states(["1_0", "1_1", "1_2"]) == {"1_0": "running", "1_1": "pending"}
    assert slurm.states([]) == {}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", "sinfo lists the partitions"),
        ("sbatch: error: Invalid generic resource (gres) specification", "--slurm.gpus 0"),
        ("sbatch: error: Job violates accounting/QOS policy", "Job violates accounting/QOS policy. Change the --slurm"),
    ],
)
def test_refusals_are_one_line(cluster, tmp_path, capsys, said, expected):
    (cluster / "fails").write_text(f"sbatch: a warning\n{said}\n")
    with pytest.raises(UserError, match="sbatch refused the jobs: ") as caught:
        submit(UNITS, tmp_path, Slurm(), name="tau")
    assert expected in str(caught.value) and "\n" not in str(caught.value) and "error:" not in str(caught.value)
    assert capsys.readouterr().err == "" and not (tmp_path / "jobs.json").exists()


def test_a_silent_slurm_submits_nothing(cluster, tmp_path):
    submit(UNITS, tmp_path, Slurm(), name="tau")
    (cluster / "fails").write_text("squeue: error: Unable to contact slurm controller\n")
    with pytest.raises(UserError, match=r"squeue failed: .*Unable to contact.* Try again"):
        submit(UNITS, tmp_path, Slurm(), name="tau")


def test_damaged_memory(cluster, tmp_path):
    (tmp_path / "jobs.json").write_text("[1,")
    with pytest.raises(UserError, match=r"jobs\.json is damaged: it is not JSON\. Delete it"):
        submit(UNITS, tmp_path, Slurm(), name="tau")


def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no Slurm here: sbatch is not on the path. .* leave out --launcher slurm"):
        submit(UNITS, tmp_path, Slurm(), name="tau")


def test_a_machine_without_submitit(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sparring\[slurm\]'"):
        submit(UNITS, tmp_path, Slurm(), name="tau")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"time": 0}, "slurm.time must be at least 1 minute, got 0"),
        ({"gpus": -1}, "slurm.gpus must be at least 0, got -1"),
        ({"cpus": 0}, "slurm.cpus must be at least 1, got 0"),
        ({"at_most": 0}, "slurm.at_most must be at least 1, got 0"),
        ({"mem": "much"}, "slurm.mem must be a number and its unit, got 'much'. Write for example 16G"),
        ({"extra": ("account =lab",)}, "slurm.extra takes KEY=VALUE, got 'account =lab'"),
        ({"extra": ("array=0-3",)}, "slurm.extra cannot set 'array'"),
    ],
)
def test_wrong_flags(given, expected):
    with pytest.raises(UserError) as caught:
        Slurm(**given)
    assert expected in str(caught.value)
