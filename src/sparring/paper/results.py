"""Results as data: one small JSON file per row, scale and seed, under results/ITEM/.

A file holds what was trained (the whole configuration), what was measured and how, the hardware, the time it took, and
the outcome. It is written atomically. Tables and figures are drawn from these files alone, and only from those whose
configuration is the declared one. A file records for every image whether it was classified correctly, so that two
methods can be compared image by image.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import UserError
from sparring.files.json_text import Damaged, Unreadable, read_json
from sparring.paper.result_schema import check
from sparring.paper.specs import Measure
from sparring.training import config as configs
from sparring.training.checkpoint import write_text
from sparring.training.config import Config

JobResult = dict[str, Any]  # the content of a file
_FORMAT = 1
_FIX = "Move it away and reproduce it again."


def declared(config: Config | None, measure: Measure, limit: int | None) -> dict[str, Any]:
    """The declaration of a result (configuration and measure), as it is written to the file."""
    how = {"kind": type(measure).__name__.lower(), **asdict(measure), "limit": limit}
    plain = {"config": None if config is None else configs.to_json(config), "measure": how}
    return _plain(plain)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As when read back from a file: tuples become lists."""
    return dict(json.loads(json.dumps(value)))


def matches(result: Mapping[str, Any], config: Config | None, measure: Measure, limit: int | None) -> bool:
    """Whether a result has this declaration."""
    same_measure = result.get("measure") == declared(config, measure, limit)["measure"]
    return same_measure and trained_by(result, config)


def trained_by(result: Mapping[str, Any], config: Config | None) -> bool:
    """Whether a result has this configuration. A field that the file lacks counts as its default."""
    return (result.get("config") is None) == (config is None) and _same(_config(result), config)


def _same(one: Config | None, other: Config | None) -> bool:
    return configs.same(one, other) if one is not None and other is not None else one is other


def _config(result: Mapping[str, Any]) -> Config | None:
    """The configuration of a result; None if nothing was trained or this version cannot read it."""
    written = result.get("config")
    try:
        return None if written is None else configs.from_json(written)
    except UserError:
        return None


def finished(result: Mapping[str, Any] | None) -> bool:
    """Whether a result holds measurements, not only the course of an unfinished training."""
    return result is not None and result.get("state") == "measured"


def file_name(row: str, scale: str, seed: int) -> str:
    """The name of the file for a row, a scale and a seed."""
    return f"{row}-{scale}-seed{seed}.json"


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result and make its folders. A file with another declaration is renamed to *.old."""
    if _differs(path, result):
        with suppress(FileNotFoundError):  # another process has put it aside
            path.replace(path.with_name(f"{path.name}.old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {path.parent}: {error.strerror}. Choose another: --results FOLDER."
        ) from None
    write_text(path, _spell({"format": _FORMAT, **result}))


def _differs(path: Path, result: Mapping[str, Any]) -> bool:
    """Whether the file at `path` is damaged or has another declaration than `result`.

    Raises:
        Unreadable: it cannot be read, so that nobody knows.
    """
    try:
        written = read(path)
    except Unreadable:
        raise
    except UserError:
        return True
    return written is not None and any(written[key] != result[key] for key in ("config", "measure"))


def read(path: Path) -> JobResult | None:
    """The result in a file; None if there is no file. A field that its configuration lacks has its default.

    Raises:
        Unreadable: the file cannot be read.
        UserError: it is damaged, or of another format.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # reading says what is wrong
    if path.is_dir():
        return None
    result = read_json(path, fix=_FIX)
    written = result.get("format") if isinstance(result, dict) else None
    if type(written) is int and written != _FORMAT:
        raise UserError(f"{path} has the format {written}, this version reads {_FORMAT}. Measure it again.")
    wrong = check(result) if written == _FORMAT else "it has no 'format'"
    config = None if wrong else _config(result)
    if config is not None and result["state"] in ("trained", "measured"):
        wrong = "" if len(result["history"]["epoch"]) == config.epochs else "its history lacks epochs"
    if wrong:
        raise Damaged(f"{path} is damaged, or not a result of Sparring: {wrong}. {_FIX}")
    return dict(result) if config is None else {**result, "config": _plain(configs.to_json(config))}


def courses(folder: Path) -> Iterator[tuple[Config, JobResult]]:
    """The results of all items whose training is complete, with their configurations."""
    for path in sorted(folder.glob("*/*-seed*.json")):
        try:
            result = read(path)
        except UserError:  # reported with its own item
            continue
        if result is not None and result["state"] in ("trained", "measured") and (config := _config(result)):
            yield config, result


def trained_on(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The environment of every start of the training (device, torch, processes at once)."""
    return result.get("trained_on") or [result["environment"]]


def starts(result: Mapping[str, Any]) -> int:
    """How often the training was started: one plus the number of times it was resumed."""
    return int(result.get("starts") or 1)


def at_once(result: Mapping[str, Any]) -> int:
    """The largest number of processes that shared the device during the training."""
    return max(int(start.get("at_once") or 1) for start in trained_on(result))


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The epochs of a run as one list per quantity that all have: a fifth of the size of one record per epoch."""
    shared = [key for key in records[0] if all(key in record for record in records)] if records else []
    return {key: [_round(record[key]) for record in records] for key in shared}


def _round(value: Any) -> Any:
    """Six significant digits: more than any figure shows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _spell(value: Any, depth: int = 0) -> str:
    """JSON with one entry per line and every list on one line: a picture has thousands of numbers."""
    if isinstance(value, Mapping) and value:
        inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(key)}: {_spell(v, depth + 1)}" for key, v in value.items())
        text = f"{{\n{inner}\n{' ' * depth}}}"
    else:
        text = json.dumps(value, separators=(",", ":"))
    return text if depth else text + "\n"


def pack(right: Iterable[bool]) -> str:
    """One bit per image (1 = classified correctly), as base64."""
    return base64.b64encode(np.packbits(np.fromiter(right, dtype=bool)).tobytes()).decode()
