"""The run folder: everything that a training run writes, and everything it needs to continue.

    config.json           the recipe's name and the whole configuration
    environment.json      versions, hardware and command of every start of the run
    metrics.jsonl         one line per epoch; lr and eps are those at its beginning
    last.safetensors      everything needed to continue: weights, momentum, place in the epoch
    best.safetensors      the weights of the best epoch on validation data
    events.out.tfevents…  the same metrics for TensorBoard; metrics.csv where it was asked for
    evaluation/           results of evaluating the model

config.json and the checkpoints carry digests of their content, and a checkpoint names those of the configuration and of
the records it belongs to: parts that were damaged, edited or mixed up do not continue as another run. Knows files only:
no model, no training. A folder that holds a run is overwritten only on request.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring._version import __version__
from sparring.errors import UserError
from sparring.files import digests, leftovers
from sparring.files.json_text import Damaged, parse, read_json, read_text
from sparring.files.regular import shown
from sparring.training import checkpoint, config, held_folder, schemas
from sparring.training.checkpoint import Checkpoint
from sparring.training.config import Config

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
CSV = "metrics.csv"  # the same records for a spreadsheet, where they were asked for
LAST, BEST = "last.safetensors", "best.safetensors"
EVALUATION = "evaluation"  # a folder: results of `sparring evaluate` and `bound`
AT_ONCE = "SPARRING_AT_ONCE"  # environment variable: the number of processes that share the device
_OWN = (LAST, BEST, METRICS, ENVIRONMENT, CONFIG)
_METRICS = 2**30  # bytes; an epoch has about 300


@dataclass(frozen=True)
class RunFolder:
    """One run folder."""

    folder: Path
    config: Config
    recipe: str
    images: str = ""  # fingerprint of the training images; "" where it was not recorded
    init: str = ""  # digest of the weights that the run began from; "" for none
    earlier: tuple[dict[str, Any], ...] = ()  # lengths and schedules that it had before it was made longer
    digest: str = field(default="", compare=False)  # of config.json as it is on the disk
    before: tuple[str, ...] = ()  # digests of config.json before it was written anew, with other names or a new length
    still: Callable[[], None] = field(default=lambda: None, compare=False)  # raises once the folder is another one

    def last(self, device: torch.device | str = "cpu") -> Checkpoint | None:
        """The checkpoint to continue from, or None before the first."""
        path = self.folder / LAST
        if not path.exists():
            return None
        found = checkpoint.load(path, device=device, check=schemas.LAST)
        self.check_belongs(LAST, found.facts)
        return found

    def best(self) -> dict[str, Any] | None:
        """The record of the best epoch, as its checkpoint has it; None before the first."""
        path = self.folder / BEST
        if not path.exists():
            return None
        facts = checkpoint.read_facts(path, schemas.BEST)
        self.check_belongs(BEST, facts)
        return dict(facts["metrics"])

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a checkpoint, whole or not at all."""
        own = {"recipe": self.recipe, "data": self.config.data, "config": self.digest}
        self.still()
        checkpoint.save(self.folder / name, tensors, {**own, **facts}, still=self.still)

    def check_parts(self) -> None:
        """Refuse a folder whose checkpoints belong to another run."""
        for name in (LAST, BEST):
            if facts := checkpoint.read_facts(self.folder / name):
                self.check_belongs(name, facts)

    def begins_anew(self) -> str:
        """A note where epochs are recorded and no checkpoint is there: a disk may have been full before the first.

        Raises:
            UserError: the best epoch was a later one. Its checkpoint came after others, which were removed.
        """
        done, best = len(self.metrics()), checkpoint.read_facts(self.folder / BEST).get("epoch", 0)
        if (self.folder / LAST).exists() or not done:
            return ""
        if best > 1:
            raise Damaged(
                f"{self.folder / LAST} is missing, though {done} epochs are recorded. Restore it, or begin anew: "
                "--overwrite."
            )
        return f"{self.folder} has no checkpoint to go on from, and begins anew."

    def check_belongs(self, name: str, facts: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that was written for another configuration."""
        if facts.get("config") not in (self.digest, *self.before):
            raise Damaged(
                f"{self.folder / name} belongs to another configuration than {CONFIG} beside it. Restore the two files "
                "of one run. To use the weights alone, copy the file elsewhere."
            )

    def metrics(self) -> list[dict[str, Any]]:
        """The records of all epochs, in order."""
        return read_metrics(self.folder)

    def keep_metrics(self, epochs: int, history: str | None = None) -> None:
        """Drop the records after the first `epochs` epochs: a resumed run records them again.

        Args:
            history: their digest, as the checkpoint has it.

        Raises:
            UserError: an epoch has no record, or another one. Some objectives depend on the records, and would
                continue as another run.
        """
        kept = self.checked_metrics(epochs, history)
        text = "".join(json.dumps(record) + "\n" for record in kept)
        checkpoint.write_text(self.folder / METRICS, text, still=self.still)

    def checked_metrics(self, epochs: int, history: str | None = None) -> list[dict[str, Any]]:
        """The records of the first `epochs` epochs; see `keep_metrics` for what is refused."""
        kept = [record for record in self.metrics() if record["epoch"] <= epochs]
        check_records(self.folder, kept, epochs, history)
        return kept

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Append one epoch's record, and wait until the disk has it."""
        self.still()
        try:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(metrics)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.folder / METRICS}: {error.strerror}.") from None


def create(
    folder: Path,
    wanted: Config,
    recipe: str,
    *,
    images: str = "",
    init: str = "",
    overwrite: bool = False,
    still: Callable[[], None] = lambda: None,
) -> RunFolder:
    """Create a run folder with the configuration and the fingerprints of the training images and initial weights."""
    if any((folder / name).exists() for name in _OWN):
        if not overwrite:
            raise UserError(
                f"{folder} already holds a run. Continue it with --resume, choose another folder with --out, "
                "or replace it with --overwrite (in Python resume=True, out=, overwrite=True)."
            )
        _clear(folder)
    elif folder.is_dir() and any(not _half_written(entry) for entry in folder.iterdir()):
        raise UserError(f"{folder} exists and is not a run folder. Choose another with --out.")
    held_folder.make(folder)
    sweep(folder)
    return write_config(RunFolder(folder, wanted, recipe, images, init, still=still))


def write_config(run: RunFolder) -> RunFolder:
    """Write config.json, and return the run with its digest."""
    written = digests.sealed(
        {
            "recipe": run.recipe,
            "sparring": __version__,
            "images": run.images,
            **({"init": run.init} if run.init else {}),
            **({"earlier": list(run.earlier)} if run.earlier else {}),
            **({"before": list(run.before)} if run.before else {}),
            "config": config.to_json(run.config),
        }
    )
    checkpoint.write_text(run.folder / CONFIG, json.dumps(written, indent=2) + "\n", still=run.still)
    return replace(run, digest=written[digests.SUM])


def keep_config(run: RunFolder) -> RunFolder:
    """Write config.json where it does not say the same, and return the run with its digest."""
    there = open_run(run.folder)
    if run == there:
        return replace(run, digest=there.digest)
    return write_config(replace(run, before=(*there.before, there.digest)))


def open_run(folder: Path) -> RunFolder:
    """The run in a folder. Only reads, so that a folder in training can be opened too."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} holds no run (no {CONFIG} in it). Check the path, or begin one with a recipe.")
    try:
        written = read_json(path, schemas.CONFIG)
    except Damaged:
        raise Damaged(
            f"{path} is damaged: it is not the JSON that a run writes. Restore it from a copy. The weights can still "
            f"be evaluated: sparring evaluate {folder / LAST}."
        ) from None
    if not digests.intact(written):
        raise Damaged(
            f"{path} was edited or damaged: it does not match its digest. Restore it; other settings are another run "
            f"(--out), which can begin from these weights (--init {folder})."
        )
    try:
        found = config.from_json(written["config"])
    except UserError as error:
        why = shown(str(error).rstrip("."), 300)
        raise Damaged(f"{path} cannot be used: {why}. Restore it from a copy, or train another run: --out.") from None
    texts = {name: written.get(name, "") for name in ("recipe", "images", "init", "sha256")}
    return RunFolder(
        folder,
        found,
        recipe=texts["recipe"],
        images=texts["images"],
        init=texts["init"],
        earlier=tuple(written.get("earlier", ())),
        digest=texts["sha256"],
        before=tuple(written.get("before", ())),
    )


def sweep(folder: Path) -> None:
    """Remove files that a killed process left half-written. Only for the process that holds the lock."""
    leftovers.sweep(folder, (*_OWN, CSV).__contains__, alone=True)


def _half_written(path: Path) -> bool:
    """Whether a path is what a killed process leaves of a file of a run: .config.json.1234.tmp."""
    found = leftovers.target(path)
    return found is not None and found[0] in (*_OWN, CSV)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The epochs recorded in a folder. A line that is not a record is left out, as the last one after a kill."""
    path = folder / METRICS
    records: list[dict[str, Any]] = []
    if path.exists():
        for line in read_text(path, most=_METRICS, errors="replace").splitlines():
            with suppress(Damaged):
                records.append(parse(line, path, schemas.RECORD))
    return records


def whole_history(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per epoch.

    Raises:
        UserError: some are missing, as in a truncated file.
    """
    last = folder / LAST
    facts = checkpoint.read_facts(last, schemas.LAST) if last.exists() else {}  # first: it may be training
    records, saved = read_metrics(folder), facts.get("epoch", 0)
    check_records(folder, records, max([saved, *(record["epoch"] for record in records)]))
    check_records(folder, records[:saved], saved, facts.get("history"))
    return records


def digest_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The digest of the records of some epochs, in order; "" for none."""
    return functools.reduce(digests.chained, records, "")


def check_records(folder: Path, records: Sequence[Mapping[str, Any]], epochs: int, history: str | None = None) -> None:
    """Refuse records that are not those of the first `epochs` epochs, one each, or have another digest."""
    if history is not None and len(records) == epochs and digest_of(records) != history:
        raise Damaged(
            f"{folder / METRICS} was edited or damaged: its first {epochs} epochs are not those of {LAST}. Restore the "
            "file. The weights are intact: sparring evaluate takes them."
        )
    there = [record.get("epoch") for record in records]
    if there != list(range(1, epochs + 1)):
        listed = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "") if there else "none"
        raise Damaged(
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
        return list(read_json(path, schemas.ENVIRONMENT)) if path.exists() else []
    except Damaged:
        raise Damaged(f"{path} is damaged. Delete it: only the record of its starts is lost.") from None


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
