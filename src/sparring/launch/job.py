"""What a job of a cluster runs: one command of `sparring`, which a signal stops, saves and puts back into the queue.

Slurm announces a time-out by USR1 or USR2 (pre-emption, too, where the cluster says so), and asks by TERM to end a job
that it cancels, pre-empts or requeues itself. Either becomes SIGTERM for the command, which saves after its step. After
USR1 or USR2 the job then requeues itself. After TERM it only ends. A requeued job is the same command, and resumes.

submitit would requeue from inside a signal handler, where the command cannot be awaited; so its handlers are replaced.
Only the standard library is imported: the job itself needs no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

_ANNOUNCED = (signal.SIGUSR1, signal.SIGUSR2)  # the end is near, and the job may queue again


def work(*words: str) -> None:
    """Run `python WORDS` to its end, or to a signal.

    Raises:
        SystemExit: it was stopped; its place is saved.
        RuntimeError: it failed, or the job could not be requeued.
    """
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.terminate()

    for number in (*_ANNOUNCED, signal.SIGTERM):
        signal.signal(number, pass_on)
    children.append(subprocess.Popen([sys.executable, *words], env=_environment(), preexec_fn=_deaf))
    if received:  # before there was a child
        children[0].terminate()
    code = children[0].wait()
    if code == 0:
        return
    if set(received) & set(_ANNOUNCED):
        requeue()
        raise SystemExit("stopped before the end of the job's time; requeued")
    if received:
        raise SystemExit("stopped by the cluster")
    raise RuntimeError(f"the command ended with exit status {code}: sparring {' '.join(words[2:])}")


def requeue() -> None:
    """Put this job back into the queue, and of an array this task alone.

    The number of one task of an array is also the number of the whole array.
    """
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]
    done = subprocess.run(["scontrol", "requeue", name], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip() or f"exit status {done.returncode}"
        raise RuntimeError(f"saved, but not requeued ({why}). Give the command that submitted it again.")


def _deaf() -> None:
    """Ignore, in the child, the signals that only the job understands: some clusters send them to every process."""
    for number in _ANNOUNCED:
        signal.signal(number, signal.SIG_IGN)


def _environment() -> dict[str, str]:
    """The job's environment, with as many threads as it has cores."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    threads = {"OMP_NUM_THREADS": cores} if cores and "OMP_NUM_THREADS" not in os.environ else {}
    return {**os.environ, **threads, "PYTHONUNBUFFERED": "1"}
