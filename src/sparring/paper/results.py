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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import UserError
from sparring.paper.specs import Measure
from sparring.training import config as configs
from sparring.training.checkpoint import write_text
from sparring.training.config import Config

JobResult = dict[str, Any]  # the content of a file
_FORMAT = 1
_REQUIRED = {"format", "row", "scale", "seed", "state", "config", "measure", "environment"}
# The required keys of `found`, by the kind of measure.
_FOUND = {
    "robustness": {"attacks"},
    "mixture": {"labels", "mixing", "points"},
    "motivation": {"labels", "probability", "paths", "mixing"},
    "losses": {"mean_loss_bits", "bound", "points"},
}


def declared(config: Config | None, measure: Measure, limit: int | None) -> dict[str, Any]:
    """The declaration of a result (configuration and measure), as it is written to the file."""
    how = {"kind": type(measure).__name__.lower(), **asdict(measure), "limit": limit}
    plain = {"config": None if config is None else configs.to_json(config), "measure": how}
    return dict(json.loads(json.dumps(plain)))  # tuples become lists, as when read back


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
        path.replace(path.with_name(f"{path.name}.old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {path.parent}: {error.strerror}. Choose another: --results FOLDER."
        ) from None
    write_text(path, _spell({"format": _FORMAT, **result}))


def _differs(path: Path, result: Mapping[str, Any]) -> bool:
    """Whether the file at `path` is unreadable or has another declaration than `result`."""
    try:
        written = read(path)
    except UserError:
        return True
    return written is not None and any(written[key] != result[key] for key in ("config", "measure"))


def read(path: Path) -> JobResult | None:
    """The result in a file; None if there is no file."""
    try:
        if not path.is_file():
            return None
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from None
    try:
        result = json.loads(text)
        whole = _whole(result)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is damaged, or not a result of Sparring. Move it away and reproduce it again.")
    if result["format"] != _FORMAT:
        raise UserError(f"{path} has the format {result['format']}, this version reads {_FORMAT}. Measure it again.")
    return dict(result)


def _whole(result: Any) -> bool:
    """Whether a file has everything that tables and figures rely on."""
    if not result.keys() >= _REQUIRED or type(result["seed"]) is not int:
        return False
    environments = [result["environment"], *(result.get("trained_on") or ())]
    if not all(isinstance(one["device"], str) and isinstance(one["torch"], str) for one in environments):
        return False
    kind = result["measure"]["kind"]
    if result["state"] == "measured" and not result["found"].keys() >= _FOUND.get(kind, set()):
        return False
    attacks = result.get("found", {}).get("attacks", {}).values()
    return all(
        isinstance(one["accuracy"], float | int)
        and isinstance(one["n"], int)
        and ("right" not in one or sum(unpack(one["right"], one["n"])) == round(one["accuracy"] * one["n"]))
        for one in attacks
    )


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
    return int(result.get("starts") or result.get("sessions") or 1)  # an alternative name in older files


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


def unpack(text: str, count: int) -> bytes:
    """The inverse of `pack`: one byte per image, 1 = classified correctly."""
    packed = base64.b64decode(text, validate=True)
    if len(packed) != -(-count // 8):  # numpy would pad or truncate
        raise ValueError(f"{len(packed)} bytes cannot hold one bit for each of {count} images")
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=count).tobytes()
