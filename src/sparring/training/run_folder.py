"""The run folder: everything that a training run writes, and everything it needs to continue.

    config.json           the recipe's name and the whole configuration
    environment.json      versions, hardware and command of every start of the run
    metrics.jsonl         one line per epoch; lr and eps are those at its beginning
    last.safetensors      everything needed to continue: weights, momentum, place in the epoch
    best.safetensors      the weights of the best epoch on validation data
    events.out.tfevents…  the same metrics for TensorBoard; metrics.csv where it was asked for
    evaluation/           results of evaluating the model

Knows files only: no model, no training. A folder that holds a run is overwritten only on request.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring._version import __version__
from sparring.errors import UserError
from sparring.training import checkpoint, config
from sparring.training.checkpoint import Checkpoint
from sparring.training.config import Config

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
CSV = "metrics.csv"  # the same records for a spreadsheet, where they were asked for
LAST, BEST = "last.safetensors", "best.safetensors"
EVALUATION = "evaluation"  # a folder: results of `sparring evaluate` and `bound`
AT_ONCE = "SPARRING_AT_ONCE"  # environment variable: the number of processes that share the device
_OWN = (LAST, BEST, METRICS, ENVIRONMENT, CONFIG)


@dataclass(frozen=True)
class RunFolder:
    """One run folder."""

    folder: Path
    config: Config
    recipe: str
    images: str = ""  # fingerprint of the training images; "" where it was not recorded
    init: str = ""  # digest of the weights that the run began from; "" for none
    earlier: tuple[dict[str, Any], ...] = ()  # lengths and schedules that it had before it was made longer

    def last(self, device: torch.device | str = "cpu") -> Checkpoint | None:
        """The checkpoint to continue from, or None before the first."""
        path = self.folder / LAST
        return checkpoint.load(path, device=device) if path.exists() else None

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a checkpoint, whole or not at all."""
        checkpoint.save(self.folder / name, tensors, {"recipe": self.recipe, "data": self.config.data, **facts})

    def metrics(self) -> list[dict[str, Any]]:
        """The records of all epochs, in order."""
        return read_metrics(self.folder)

    def keep_metrics(self, epochs: int) -> None:
        """Drop the records after the first `epochs` epochs: a resumed run records them again.

        Raises:
            UserError: an epoch has no record. Some objectives depend on the records, and would continue as another run.
        """
        kept = [record for record in self.metrics() if record["epoch"] <= epochs]
        check_records(self.folder, kept, epochs)
        checkpoint.write_text(self.folder / METRICS, "".join(json.dumps(record) + "\n" for record in kept))

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Append one epoch's record, and wait until the disk has it."""
        try:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(metrics)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.folder / METRICS}: {error.strerror}.") from None


@contextmanager
def claimed(folder: Path, *, by: str = "training process") -> Iterator[None]:
    """Create the folder and lock it against other processes (what they are: `by`) for the time of the block.

    The lock is the operating system's, on the folder itself: it ends with the process, however that ends. On file
    systems without locks there is none.
    """
    _make(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder} is in use by another {by}. Wait for it, or stop it.") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.EBADF):
            raise
    try:
        yield
    finally:
        os.close(descriptor)


def create(
    folder: Path, wanted: Config, recipe: str, *, images: str = "", init: str = "", overwrite: bool = False
) -> RunFolder:
    """Create a run folder with the configuration and the fingerprints of the training images and initial weights."""
    if any((folder / name).exists() for name in _OWN):
        if not overwrite:
            raise UserError(
                f"{folder} already holds a run. Continue it with --resume, choose another folder with --out, "
                "or replace it with --overwrite (in Python resume=True, out=, overwrite=True)."
            )
        _clear(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not a run folder. Choose another with --out.")
    _make(folder)
    run = RunFolder(folder, wanted, recipe, images, init)
    write_config(run)
    return run


def write_config(run: RunFolder) -> None:
    """Write config.json."""
    written = {
        "recipe": run.recipe,
        "sparring": __version__,
        "images": run.images,
        **({"init": run.init} if run.init else {}),
        **({"earlier": list(run.earlier)} if run.earlier else {}),
        "config": config.to_json(run.config),
    }
    checkpoint.write_text(run.folder / CONFIG, json.dumps(written, indent=2) + "\n")


def keep_config(run: RunFolder) -> None:
    """Write config.json where it does not say the same."""
    if run != open_run(run.folder):
        write_config(run)


def _make(folder: Path) -> None:
    if str(folder) != str(folder).encode("utf-8", "replace").decode():
        raise UserError(f"the name of {folder} is not UTF-8, which checkpoints need. Choose another with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}. Choose another with --out.") from None


def open_run(folder: Path) -> RunFolder:
    """The run in a folder. Only reads, so that a folder in training can be opened too."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} holds no run (no {CONFIG} in it). Check the path, or begin one with a recipe.")
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        found = config.from_json(written["config"])
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise UserError(
            f"{path} is damaged: it is not the JSON that a run writes. The weights can still be evaluated; to train, "
            "begin anew: sparring train ... --overwrite."
        ) from None
    texts = {name: str(written.get(name, "")) for name in ("recipe", "images", "init")}
    earlier = written.get("earlier", ())
    return RunFolder(folder, found, **texts, earlier=tuple(earlier) if isinstance(earlier, list) else ())


def sweep(folder: Path) -> None:
    """Remove files that a killed process left half-written. Only for the process that holds the lock."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The epochs recorded in a folder. A last line that was cut short by a kill is left out."""
    path = folder / METRICS
    records: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(json.JSONDecodeError):
                record = json.loads(line)
                records += [record] if isinstance(record, dict) else []
    return records


def whole_history(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per epoch.

    Raises:
        UserError: some are missing, as in a truncated file.
    """
    last = folder / LAST
    saved = int(checkpoint.read_facts(last).get("epoch", 0)) if last.exists() else 0  # first: it may be training
    records = read_metrics(folder)
    check_records(folder, records, max([saved, *(record.get("epoch", 0) for record in records)]))
    return records


def check_records(folder: Path, records: Sequence[Mapping[str, Any]], epochs: int) -> None:
    """Refuse records that are not those of the first `epochs` epochs, one each."""
    there = [record.get("epoch") for record in records]
    if there != list(range(1, epochs + 1)):
        listed = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "") if there else "none"
        raise UserError(
            f"{folder / METRICS} is damaged: of {epochs} epochs each should have a record, there are {listed}. Restore "
            "the file. The weights are intact: sparring evaluate takes them."
        )


def stage(facts: Mapping[str, Any]) -> str:
    """Where a checkpoint stands: 'epoch 2', or 'epoch 2 and 11 steps' where a run was stopped within the third."""
    steps = facts.get("step") or 0
    return f"epoch {facts['epoch']}" + (f" and {steps} step{'s' if steps > 1 else ''}" if steps else "")


def note_environment(folder: Path, device: torch.device, **more: Any) -> None:
    """Add the versions, hardware, processes and command of this start to environment.json."""
    start = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **environment(device), **more}
    checkpoint.write_text(folder / ENVIRONMENT, json.dumps([*read_environment(folder), start], indent=2) + "\n")


def read_environment(folder: Path) -> list[dict[str, Any]]:
    """The starts of the run, in order: one more than it was resumed."""
    path = folder / ENVIRONMENT
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged. Delete it: only the record of its starts is lost.") from None


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, as every result records them. No host name, and of the program's path only its name.

    `at_once`: the number of processes that shared the device; above 1, times say little.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "sparring": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": torch.get_num_threads(),
        "at_once": int(os.environ.get(AT_ONCE, "1")),
        "command": shlex.join([_program(), *sys.argv[1:]]),
    }


def _program() -> str:
    """The program as typed, without its path; `python -m sparring` is sparring."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def _clear(folder: Path) -> None:
    """Remove the files of a run, its evaluations included, and nothing else."""
    shutil.rmtree(folder / EVALUATION, ignore_errors=True)
    for path in [*folder.glob("events.out.tfevents.*"), *folder.glob(".*.tmp"), folder / CSV]:
        path.unlink(missing_ok=True)
    for name in _OWN:  # the configuration last: until it is gone this is still a run
        (folder / name).unlink(missing_ok=True)
