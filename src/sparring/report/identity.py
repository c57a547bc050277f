"""The settings of a run with what its configuration names but does not hold: images, a network, an optimiser, weights.

Two runs may both say `own:Sequential` or the same folder, and have trained other things. What a run folder records of
them keeps such runs apart. Only reads the headers of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring import models
from sparring.files.schema import anything, fields, items, nothing_or, number
from sparring.training import checkpoint, run_folder
from sparring.training.config import flat_json
from sparring.training.optimisers import OWN
from sparring.training.run_folder import RunFolder

_UNKNOWN = "unknown"  # not recorded: as by an earlier version, or in a folder without its checkpoints
_NAMED_BY = {"images": "data", "network": "model", "init_weights": "init"}  # digests, and the settings that name them
_HOW = ("foreach", "fused", "capturable", "differentiable")  # how an optimiser computes, not what
# What a checkpoint records of the optimiser that the caller made: the numbers of each of its groups.
_GROUP = fields(lr=number(-1e30, 1e30), optional=("lr",), others=anything)
_FACTS = fields(
    optimizer=nothing_or(fields(made=nothing_or(items(_GROUP, most=100_000)), optional=("made",), others=anything)),
    optional=("optimizer",),
    others=anything,
)


def settings_of(run: RunFolder) -> dict[str, Any]:
    """The flat configuration and the identity of what it names: runs with equal settings are the same run."""
    config = run.config
    found = flat_json(config) | {"images": _short(run.images)}
    if not models.built_in(config.model):
        found["network"] = _network(run.folder)
    if config.init:
        found["init_weights"] = _short(run.init)
    if config.optimizer.startswith(OWN):
        found |= _optimiser(run.folder)
    return found


def to_show(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings worth showing: a digest only where runs give one name to things that differ."""
    said = {digest for digest, name in _NAMED_BY.items() if _ambiguous(runs, digest, name)}
    return [{name: value for name, value in run.items() if name in said or name not in _NAMED_BY} for run in runs]


def _ambiguous(runs: Sequence[Mapping[str, Any]], digest: str, name: str) -> bool:
    pairs = {(str(run[name]), str(run[digest])) for run in runs if digest in run}
    return len(pairs) > len({named for named, _ in pairs})


def _short(digest: str) -> str:
    """The beginning of every part. The # keeps a digest from being read as a number: 12345e67."""
    return f"#{'+'.join(part[:8] for part in digest.split('+'))}" if digest else _UNKNOWN


def _network(folder: Path) -> str:
    """A digest of the names and shapes of the network's parameters and buffers."""
    for name in (run_folder.LAST, run_folder.BEST):
        shapes = checkpoint.read_shapes(folder / name)
        own = {key: shape for key, shape in shapes.items() if key.startswith("model.")}
        if own:
            return _short(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest())
    return _UNKNOWN


def _optimiser(folder: Path) -> dict[str, Any]:
    """The numbers that an optimiser of the caller's own began with: optimizer.weight_decay.

    The schedule sets the learning rate, so that only the ratios between groups are the optimiser's.
    """
    facts = checkpoint.read_facts(folder / run_folder.LAST)
    if _FACTS(facts):
        return {"optimizer.numbers": _UNKNOWN}
    groups = (facts.get("optimizer") or {}).get("made") or []
    names = dict.fromkeys(name for group in groups for name in group if name not in ("lr", *_HOW))
    found = {f"optimizer.{name}": _joint([group.get(name) for group in groups]) for name in names}
    rates = [group["lr"] for group in groups if "lr" in group]
    ratios = [rate / rates[0] if rates[0] else rate for rate in rates]
    return found | ({"optimizer.lr_ratios": _joint(ratios)} if any(ratio != 1 for ratio in ratios) else {})


def _joint(values: Sequence[Any]) -> Any:
    """The value that all groups have, or those of each; a list as text."""
    spelled = [", ".join(map(str, value)) if isinstance(value, list) else value for value in values]
    return spelled[0] if all(each == spelled[0] for each in spelled) else " | ".join(map(str, spelled))
