"""Runs that look as if they had been trained otherwise: their files are changed, and their digests with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparring.files import digests
from sparring.training import checkpoint, run_folder


def doctor(
    folder: Path,
    config: Callable[[dict[str, Any]], object] = lambda content: None,
    records: Callable[[list[dict[str, Any]]], object] = lambda records: None,
) -> None:
    """Change the content of config.json and the records of a run in place, and let its checkpoints belong to them."""
    path = folder / run_folder.CONFIG
    content = json.loads(path.read_text())
    content.pop(digests.SUM, None)
    config(content)
    written = digests.sealed(content)
    path.write_text(json.dumps(written))
    history = run_folder.read_metrics(folder)
    records(history)
    if history:
        (folder / run_folder.METRICS).write_text("".join(json.dumps(record) + "\n" for record in history))
    for name in (run_folder.LAST, run_folder.BEST):
        if (folder / name).exists():
            found = checkpoint.load(folder / name)
            facts = found.facts | {"config": written[digests.SUM]}
            if name == run_folder.LAST:
                facts["history"] = run_folder.digest_of(history[: facts["epoch"]])
            checkpoint.save(folder / name, found.tensors, facts)


def replaced(**values: Any) -> Callable[[dict[str, Any]], None]:
    """A change of settings: attack_tau for attack.tau."""

    def change(content: dict[str, Any]) -> None:
        for name, value in values.items():
            block = content["config"]["attack"] if name.startswith("attack_") else content["config"]
            block[name.removeprefix("attack_")] = value

    return change
