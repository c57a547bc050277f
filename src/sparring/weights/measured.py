"""What is known of a model besides its weights: the threat it was trained for, and what evaluations of it measured.

Reads the JSON that `sparring evaluate` leaves in a run's evaluation/ folder. Every record keeps what a reader needs to
judge the number: n, eps, the attack's settings, the device and the command. Must not know how anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.errors import UserError
from sparring.files.json_text import read_json
from sparring.files.result_json import NAME, RESULT, SHARE
from sparring.files.schema import anything, fields, items, nothing_or, number, text, whole
from sparring.training import run_folder

_OF_THE_ATTACK = ("accuracy", "spread", "n", "eps", "steps", "step_size", "loss", "start", "restarts", "precision")


# What `records` and `threat` return, as an exported file keeps it.
_RECORDS = items(
    fields(
        attack=NAME,
        accuracy=SHARE,
        spread=nothing_or(SHARE),
        n=whole(1),
        eps=number(0, 1e6),
        norm=NAME,
        steps=whole(),
        step_size=number(0, 1e6),
        loss=NAME,
        start=nothing_or(NAME),
        restarts=whole(),
        precision=NAME,
        over=nothing_or(items(NAME, most=1000)),
        protocols=items(NAME, most=1000),
        doubts=items(NAME, most=1000),
        data=text(),
        device=text(),
        torch=text(),
        sparring=text(),
        command=nothing_or(text()),
        others=anything,
    ),
    most=10_000,
)
_THREAT = nothing_or(fields(norm=NAME, eps=number(0, 1e6), others=anything))


def trusted(facts: Mapping[str, Any], source: Path) -> tuple[dict[str, Any], list[str]]:
    """The facts of an exported file, without a threat or measurements that no export writes, and notes on these."""
    wrong = {"measured": _RECORDS(facts.get("measured", [])), "threat": _THREAT(facts.get("threat"))}
    notes = [f"left out what {source.name} records as {name!r}: {why}." for name, why in wrong.items() if why]
    return {name: value for name, value in facts.items() if not wrong.get(name)}, notes


def threat(folder: Path) -> dict[str, Any] | None:
    """The norm and the radius that a run was trained for; None where it saw no attack or does not say."""
    try:
        objective = run_folder.open_run(folder).config.objective
    except UserError:  # not a run, or its configuration cannot be read
        return None
    if not objective.radius > 0:
        return None
    return {"norm": getattr(objective, "norm", "linf"), "eps": objective.radius}


def records(folder: Path, *, which: str, epoch: int | None) -> tuple[list[dict[str, Any]], list[str]]:
    """What was measured of one checkpoint of a run, AutoAttack first, and notes on results that were left out."""
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for path in sorted((folder / run_folder.EVALUATION).glob("*.json")):
        if path.name.startswith("bound"):  # of `sparring bound`: losses, not accuracies
            continue
        try:
            written = read_json(path, RESULT)
        except UserError as error:
            notes.append(f"left out {path.name}: {error}")
            continue
        about = written["about"]
        if about.get("which", which) != which:
            continue
        if (measured := about.get("facts", {}).get("epoch")) != epoch:
            notes.append(f"left out {path.name}: it was measured at epoch {measured}.")
            continue
        found += [_record(record, written) for record in written["records"]]
    distinct = {json.dumps(_settings(record), sort_keys=True): record for record in found}
    return sorted(distinct.values(), key=_rank), notes


def _record(record: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    about, software = whole["about"], whole["software"]
    return {
        "attack": record["name"],
        **{key: record[key] for key in _OF_THE_ATTACK},
        "norm": record.get("norm", "linf"),
        "over": record["detail"].get("over"),  # of a worst case: the attacks that it is the worst of
        "seeds": [run["seed"] for run in record["runs"]],
        "protocols": sorted({name.partition("@")[2] or name for name in record["serves"]}),
        "data": public(about.get("data") or "data that are not recorded"),
        **{name: software.get(name, "not recorded") for name in ("device", "torch", "sparring")},
        "command": about.get("command"),
        "doubts": sorted({doubt["name"] for doubt in whole["doubts"]}),
    }


def _settings(record: Mapping[str, Any]) -> list[Any]:
    """What makes a measurement the same as another one: all but its outcome."""
    keys = ("attack", "n", "eps", "steps", "step_size", "loss", "start", "restarts", "seeds", "data", "norm", "over")
    return [record[key] for key in keys]


def _rank(record: Mapping[str, Any]) -> tuple[int, float]:
    """AutoAttack, then natural accuracy, then the other attacks from the strongest on."""
    first = {"autoattack": 0, "natural": 1}
    return first.get(record["attack"], 2), record["accuracy"]


def public(data: str) -> str:
    """A data set as others may read it: of a path only its last part."""
    kind, _, path = data.partition(":")
    return f"{kind}:{Path(path).name}" if kind in ("folder", "npz") else data
