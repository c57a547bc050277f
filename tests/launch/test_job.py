"""A job: its command gets SIGTERM on every signal, and only an announced end puts the job back into the queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Saves on SIGTERM, as sparring does. Signals that only the job understands must not reach it.
PATIENT = """
import os, signal, sys, time
def stop(*_):
    open("saved", "w").close()
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
for number in (signal.SIGUSR1, signal.SIGUSR2):
    assert signal.getsignal(number) is signal.SIG_IGN
open("ready", "w").close()
time.sleep(30)
"""
JOB = "import sys; from sparring.launch.job import work; work(*sys.argv[1:])"


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Start a job of an array whose scontrol keeps its words."""
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\necho "$@" >> requeued\n[ ! -e broken ] || { echo no >&2; exit 1; }\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.delenv("OMP_NUM_THREADS")

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", JOB, *words]
        return subprocess.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE)

    return start


def signalled(process: subprocess.Popen[str], folder: Path, number: int) -> tuple[int, str]:
    """Signal a job whose command is ready; its exit code and errors."""
    end = time.monotonic() + 20
    while not (folder / "ready").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=20)
    return process.returncode, complaint


def test_a_command_that_ends_is_the_end(job, tmp_path):
    process = job("-c", "import os; open('threads', 'w').write(os.environ['OMP_NUM_THREADS'])")
    assert process.wait(20) == 0 and not (tmp_path / "requeued").exists()
    assert (tmp_path / "threads").read_text() == "3"  # the cores of the job
    process.stderr.close()


def test_a_command_that_fails_is_a_failure(job, tmp_path):
    process = job("-c", "raise SystemExit(7)")
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 1 and "exit status 7" in complaint and not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_an_announced_end_saves_and_requeues_this_task_alone(job, tmp_path, number):
    code, complaint = signalled(job("-c", PATIENT), tmp_path, number)
    assert code == 1 and "requeued" in complaint
    assert (tmp_path / "saved").exists() and (tmp_path / "requeued").read_text() == "requeue 7_2\n"


def test_an_end_that_slurm_decides_saves_only(job, tmp_path):
    code, complaint = signalled(job("-c", PATIENT), tmp_path, signal.SIGTERM)
    assert code == 1 and "stopped by the cluster" in complaint
    assert (tmp_path / "saved").exists() and not (tmp_path / "requeued").exists()


def test_a_job_that_is_no_array(job, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    signalled(job("-c", PATIENT), tmp_path, signal.SIGUSR2)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_refused_requeue_says_what_to_do(job, tmp_path):
    (tmp_path / "broken").touch()
    code, complaint = signalled(job("-c", PATIENT), tmp_path, signal.SIGUSR2)
    assert code == 1 and "saved, but not requeued (no). Give the command that submitted it again." in complaint
