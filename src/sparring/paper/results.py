"""Results as data: one small JSON file for each row, scale and seed, under results/ITEM/.

A file says what was trained (the whole configuration), what was measured and how, on which hardware, how long it took,
and what came out. It is written whole or not at all. Tables and figures are drawn from these files only, and only from
those whose configuration is the declared one. The verdict on every image is in it, so that two methods can be compared
image by image.
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

Result = dict[str, Any]
_FORMAT = 1
_NAMED_BY = {"format", "row", "scale", "seed", "state", "config", "measure", "environment"}
# What a finding holds, by the kind of its measure.
_FOUND = {
    "robustness": {"attacks"},
    "mixture": {"labels", "mixing", "points"},
    "motivation": {"labels", "probability", "paths", "mixing"},
    "losses": {"mean_loss_bits", "bound", "points"},
}


def declared(config: Config | None, measure: Measure, limit: int | None) -> dict[str, Any]:
    """What a result is made by, as it is written in the file."""
    how = {"kind": type(measure).__name__.lower(), **asdict(measure), "limit": limit}
    plain = {"config": None if config is None else configs.to_json(config), "measure": how}
    return dict(json.loads(json.dumps(plain)))  # tuples become lists, as they are read back


def matches(result: Mapping[str, Any], config: Config | None, measure: Measure, limit: int | None) -> bool:
    """Whether a result was made by this declaration."""
    same_measure = result.get("measure") == declared(config, measure, limit)["measure"]
    return same_measure and trained_by(result, config)


def trained_by(result: Mapping[str, Any], config: Config | None) -> bool:
    """Whether a result is of this configuration. A field that came after it was written had its default value."""
    return (result.get("config") is None) == (config is None) and _config(result) == config


def _config(result: Mapping[str, Any]) -> Config | None:
    """None where nothing was trained, or by another version, or where it is damaged."""
    written = result.get("config")
    try:
        return None if written is None else configs.from_json(written)
    except UserError:
        return None


def finished(result: Mapping[str, Any] | None) -> bool:
    """Whether it holds measurements, not only the course of a training that has yet to end."""
    return result is not None and result.get("state") == "measured"


def file_name(row: str, scale: str, seed: int) -> str:
    """Of the one file for a row, a scale and a seed."""
    return f"{row}-{scale}-seed{seed}.json"


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, its folders too. One that another declaration made is kept beside it (.old)."""
    if _strange(path, result):
        path.replace(path.with_name(f"{path.name}.old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path.parent}: {error.strerror}. Choose another: --results.") from None
    write_text(path, _spell({"format": _FORMAT, **result}))


def _strange(path: Path, result: Mapping[str, Any]) -> bool:
    """Whether something else stands where a result is to be written."""
    try:
        before = read(path)
    except UserError:
        return True
    return before is not None and any(before[key] != result[key] for key in ("config", "measure"))


def read(path: Path) -> Result | None:
    """The result in a file, or None where there is none."""
    try:
        if not path.is_file():
            return None
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. See to its permissions.") from None
    try:
        result = json.loads(text)
        whole = _whole(result)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is damaged, or no result of Sparring's. Move it away, and reproduce it again.")
    if result["format"] != _FORMAT:
        raise UserError(f"{path} has the format {result['format']}, this version reads {_FORMAT}. Measure it again.")
    return dict(result)


def _whole(result: Any) -> bool:
    """Whether everything is there that tables and figures rely on."""
    if not result.keys() >= _NAMED_BY or type(result["seed"]) is not int:
        return False
    sessions = [result["environment"], *(result.get("trained_on") or ())]
    if not all(isinstance(one["device"], str) and isinstance(one["torch"], str) for one in sessions):
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


def courses(folder: Path) -> Iterator[tuple[Config, Result]]:
    """The results of all items, with their configurations, whose runs came to their end: the epochs are in them."""
    for path in sorted(folder.glob("*/*-seed*.json")):
        try:
            result = read(path)
        except UserError:  # its own item tells of it
            continue
        if result is not None and result["state"] in ("trained", "measured") and (config := _config(result)):
            yield config, result


def trained_on(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sessions that trained it, with device, torch and company; a measurement may have been made elsewhere."""
    return result.get("trained_on") or [result["environment"]]


def at_once(result: Mapping[str, Any]) -> int:
    """How many processes shared the device, at most, while it was trained."""
    return max(int(session.get("at_once") or 1) for session in trained_on(result))  # None: before it was noted


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The epochs of a run as one list a quantity that all have: a fifth of the size of a record an epoch."""
    shared = [key for key in records[0] if all(key in record for record in records)] if records else []
    return {key: [_round(record[key]) for record in records] for key in shared}


def _round(value: Any) -> Any:
    """Six digits: more than any figure shows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _spell(value: Any, depth: int = 0) -> str:
    """JSON with an entry a line, but lists of numbers on one: a picture has thousands."""
    if isinstance(value, Mapping) and value:
        inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(key)}: {_spell(v, depth + 1)}" for key, v in value.items())
        text = f"{{\n{inner}\n{' ' * depth}}}"
    else:
        text = json.dumps(value, separators=(",", ":"))
    return text if depth else text + "\n"


def pack(right: Iterable[bool]) -> str:
    """One verdict an image, eight in a byte, as text."""
    return base64.b64encode(np.packbits(np.fromiter(right, dtype=bool)).tobytes()).decode()


def unpack(text: str, count: int) -> bytes:
    """The verdicts again: a byte an image, 1 where it is right."""
    packed = base64.b64decode(text, validate=True)
    if len(packed) != -(-count // 8):  # numpy would fill up, or cut
        raise ValueError(f"{len(packed)} bytes hold the verdicts on {count} images")
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=count).tobytes()
