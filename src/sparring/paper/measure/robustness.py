"""Accuracy under a protocol and under AutoAttack, as a result keeps it: numbers, their settings, and the verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring.data import Dataset
from sparring.evaluation import AttackResult, evaluate
from sparring.paper.results import pack
from sparring.paper.specs import Robustness
from sparring.training.checkpoint import write_text

_BATCH = 1024  # images of AutoAttack at once: what a stop can cost


def measure(
    what: Robustness,
    model: nn.Module,
    data: Dataset,
    *,
    device: torch.device,
    seed: int,
    limit: int | None,
    folder: Path,
    about: Mapping[str, Any],
    progress: bool,
) -> dict[str, Any]:
    """Evaluate. On a GPU gradients are bf16; verdicts are fp32 everywhere.

    Args:
        folder: a run's evaluation/. Verdicts that it holds are not computed again, and the evaluations are written
            there as `sparring evaluate` would, for its report.
        about: which checkpoint of which data it is.
    """
    x, y = data.test.x[:limit], data.test.y[:limit]
    which = "" if about["which"] == "last" else f"-{about['which']}"
    common: dict[str, Any] = {
        "seed": seed,
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "store": folder / f"verdicts{which}",
        "progress": progress,
        "about": about,
    }
    end = f"{which}{f'-limit{limit}' if limit else ''}.json"
    # A table's numbers are looked at twice; a figure has too many points for that.
    found = evaluate(model, x, y, what.protocol, doubts=what.autoattack > 0, **common)
    write_text(folder / f"{what.protocol}{end}", found.to_json())
    attacks = {record.name: _facts(record) for record in found}
    if what.autoattack:
        n = min(what.autoattack, len(x))
        strongest = evaluate(model, x[:n], y[:n], "autoattack", doubts=False, batch_size=_BATCH, **common)
        write_text(folder / f"autoattack{end}", strongest.to_json())
        attacks["autoattack"] = _facts(strongest["autoattack"])
    return {"n": len(x), "data": data.note, "attacks": attacks, "doubts": [dict(doubt) for doubt in found.doubts]}


def _facts(record: AttackResult) -> dict[str, Any]:
    """One attack: what came out, and everything needed to run it again."""
    return {
        "accuracy": record.accuracy,
        "n": record.n,
        "eps": record.eps,
        "steps": record.steps,
        "step_size": record.step_size,
        "loss": record.loss,
        "start": record.start,
        "precision": record.precision,
        "seconds": round(record.seconds, 2),
        "right": pack(record.correct.tolist()),
        **({"detail": record.detail} if record.detail else {}),
    }
