"""Accuracy under a protocol and under AutoAttack, for a result: numbers, settings, and the verdict on every image."""

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

_BATCH = 4096  # images of AutoAttack at once: an interruption loses at most one batch


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
    """Evaluate a model. On a GPU gradients are bf16; verdicts are always fp32.

    Args:
        folder: a run's evaluation/. Verdicts stored there are reused, and the evaluations are written there as by
            `sparring evaluate`, so that `sparring report` finds them.
        about: which checkpoint, trained on which data.
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
    # Sanity checks only for tables: a figure has too many points.
    found = evaluate(model, x, y, what.protocol, doubts=what.autoattack > 0, **common)
    write_text(folder / f"{what.protocol}{end}", found.to_json())
    attacks = {record.name: _facts(record) for record in found}
    if what.autoattack:
        n = min(what.autoattack, len(x))
        strongest = evaluate(model, x[:n], y[:n], "autoattack", doubts=False, batch_size=_BATCH, **common)
        write_text(folder / f"autoattack{end}", strongest.to_json())
        attacks["autoattack"] = _facts(strongest["autoattack"])
    return {"n": found.n, "data": data.note, "attacks": attacks, "doubts": [dict(doubt) for doubt in found.doubts]}


def _facts(record: AttackResult) -> dict[str, Any]:
    """One attack: its accuracy, and every setting needed to run it again."""
    return {
        "accuracy": record.accuracy,
        "n": record.n,
        "eps": record.eps,
        **({"norm": record.norm} if record.norm != "linf" else {}),
        "steps": record.steps,
        "step_size": record.step_size,
        "loss": record.loss,
        "start": record.start,
        "precision": record.precision,
        "seconds": round(record.seconds, 2),
        "right": pack(record.correct.tolist()),
        **({"detail": record.detail} if record.detail else {}),
    }
