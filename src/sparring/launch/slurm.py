"""Units as a job array of a Slurm cluster, through submitit.

What submitit pickles is the function `job.work` by its name and the words of a command, nothing else; the results that
it pickles are never read. Which job has which unit stands in jobs.json beside the logs, so that a command given again
does not submit what is still in the queue.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparring.errors import UserError
from sparring.files.json_text import read_json
from sparring.files.leftovers import sweep
from sparring.files.schema import table
from sparring.files.schema import text as a_text
from sparring.launch import job
from sparring.launch.unit import Unit
from sparring.training.checkpoint import write_text
from sparring.training.held_folder import claimed

JOBS = "jobs.json"
_JOBS = table(a_text(100))  # job ids by the names of units
_FIX = "Delete it once no job of it is in the queue (squeue --me): it only says which are."
NOTICE = 90  # seconds between the signal and a job's end; a run saves after its step
_OURS = ("array", "error", "open-mode", "output", "requeue", "signal")  # what submitit and this module need themselves


@dataclass(frozen=True)
class Slurm:
    """What each job asks of the cluster."""

    partition: str | None = None
    """Partition of the jobs; the cluster's default unless given."""
    time: int = 240
    """Minutes that a job may take. A run that needs more is saved, requeued and resumed."""
    gpus: int = 1
    """GPUs of each job; 0 on a cluster without them. Several train one run together."""
    cpus: int | None = None
    """CPU cores of each job; the cluster's default unless given."""
    mem: str | None = None
    """Memory of each job, for example 16G; the cluster's default unless given."""
    at_most: int | None = None
    """Jobs that may run at the same time."""
    extra: tuple[str, ...] = ()
    """More flags of sbatch, KEY=VALUE: account=lab qos=low constraint=a100."""

    def __post_init__(self) -> None:
        if self.time < 1:
            raise UserError(f"slurm.time must be at least 1 minute, got {self.time}. Write for example 240.")
        if self.gpus < 0:
            raise UserError(f"slurm.gpus must be at least 0, got {self.gpus}. Write for example 1.")
        for name in ("cpus", "at_most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"slurm.{name} must be at least 1, got {value}. Leave it out for the default.")
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?B?", self.mem, re.IGNORECASE):
            raise UserError(f"slurm.mem must be a number and its unit, got {self.mem!r}. Write for example 16G.")
        for text in self.extra:
            key = text.partition("=")[0]
            if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", text):
                raise UserError(f"slurm.extra takes KEY=VALUE, got {text!r}. Write for example account=lab.")
            if key in _OURS:
                raise UserError(f"slurm.extra cannot set {key!r}, which the jobs need themselves. Leave it out.")

    @property
    def parameters(self) -> dict[str, Any]:
        """The names that submitit gives them. A key alone is a flag without a value."""
        given = {
            "partition": self.partition,
            "time": self.time,
            "gpus_per_node": self.gpus or None,
            "cpus_per_task": self.cpus,
            "mem": self.mem,
            "array_parallelism": self.at_most,
        }
        more: dict[str, Any] = {"requeue": True}
        for text in self.extra:
            key, equals, value = text.partition("=")
            more[key] = value if equals else True
        return {name: value for name, value in given.items() if value is not None} | {"additional_parameters": more}


DEFAULT = Slurm()


@dataclass(frozen=True)
class Submission:
    """Job ids by the names of the units: those submitted now, and those that were in the queue already."""

    new: Mapping[str, str]
    queued: Mapping[str, str]


def submit(units: Sequence[Unit], folder: Path, asked: Slurm, *, name: str) -> Submission:
    """Submit the units that are not in the queue as one array; logs and jobs.json go to `folder`.

    Raises:
        UserError: there is no Slurm or no submitit here, or Slurm refuses the jobs.
    """
    check_here()
    with claimed(folder, by="command that submits jobs"):
        sweep(folder, JOBS.__eq__)
        known = submitted(folder)
        queued = {unit.name: known[unit.name] for unit in units if unit.name in known}
        alive = states(queued.values())
        queued = {name: number for name, number in queued.items() if number in alive}
        missing = [unit for unit in units if unit.name not in queued]
        if not missing:
            return Submission({}, queued)
        numbers = _sbatch([_words(unit, asked) for unit in missing], folder, asked, name)
        new = {unit.name: number for unit, number in zip(missing, numbers, strict=True)}
        write_text(folder / JOBS, json.dumps({**known, **new}, indent=2) + "\n")
        return Submission(new, queued)


def check_here() -> None:
    """Refuse a machine without Slurm's commands or without submitit."""
    missing = [name for name in ("sbatch", "squeue", "srun") if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"there is no Slurm here: {missing[0]} is not on the path. Run this where jobs are submitted, or leave out "
            "--launcher slurm."
        )
    if find_spec("submitit") is None:
        raise UserError("the Slurm launcher needs submitit, which is not installed: pip install 'sparring[slurm]'.")


def submitted(folder: Path) -> dict[str, str]:
    """The job that each unit was last submitted as."""
    path = folder / JOBS
    if not path.exists():
        return {}
    found: dict[str, str] = read_json(path, _JOBS, fix=_FIX)
    return found


def states(numbers: Collection[str]) -> dict[str, str]:
    """Those of the jobs that are in the queue, with their states in lower case: pending, running, completing.

    Needs no accounting: a job that has ended is not in the queue.
    """
    if not numbers:
        return {}
    words = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %T"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"squeue failed: {_one_line(done.stderr)}. Try again when Slurm answers.")
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.strip())
    return {number: found[number].strip().lower() for number in numbers if number in found}


def log_of(number: str, folder: Path) -> Path:
    """What a job prints; its errors are in the same name with .err."""
    return folder / f"{number}_0_log.out"


def whole(numbers: Collection[str]) -> list[str]:
    """The arrays of the jobs, each once: 12 for 12_0 and 12_1."""
    return list(dict.fromkeys(number.partition("_")[0] for number in numbers))


def _words(unit: Unit, asked: Slurm) -> list[str]:
    """The words after `python`: one process, or one per GPU of the job."""
    together = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.gpus)]
    return [*(together if asked.gpus > 1 else []), "-m", "sparring", *unit.words]


def _sbatch(commands: Sequence[Sequence[str]], folder: Path, asked: Slurm, name: str) -> list[str]:
    """The ids of the jobs that run these commands."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(job_name=name, signal_delay_s=NOTICE, **asked.parameters)
    try:
        with contextlib.redirect_stderr(io.StringIO()), executor.batch():  # submitit prints what it also raises
            jobs = [executor.submit(job.work, *words) for words in commands]
        return [str(each.job_id) for each in jobs]
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        raise UserError(f"sbatch refused the jobs: {_why(error)}. {_fix(str(error), asked)}") from None


def _why(error: Exception) -> str:
    """The line of sbatch's own error, without its program's name."""
    lines = [line for line in str(error).splitlines() if "error:" in line]
    return _one_line(lines[-1].partition("error:")[2] if lines else str(error))


def _fix(why: str, asked: Slurm) -> str:
    if "gres" in why.lower() and asked.gpus:
        return "On a cluster without GPUs add --slurm.gpus 0."
    if "partition" in why.lower():
        return "sinfo lists the partitions: --slurm.partition NAME."
    return "Change the --slurm flags, or ask the cluster's documentation."


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".") or "no reason given"


def cancel(numbers: Collection[str]) -> str:
    """The command that cancels the jobs."""
    return shlex.join(["scancel", *whole(numbers)])
