"""What the JSON of an evaluation must look like, for every reader of it: verdicts that fit the counts, facts by name.

An evaluation's `about` is the caller's own, so that only the names that readers look up are declared there.
"""

from __future__ import annotations

import math
import re
from typing import Any

from sparring.files.schema import anything, both, fields, items, nothing_or, number, one_of, table, text, whole

MOST_IMAGES = 10_000_000
SEED = whole(0, 2**63 - 1)
NAME = text(1000)
SHARE = number(0, 1)
_TIME = number(0, 1e12)  # seconds
_NEAR = 1e-6  # of an accuracy that is written beside its verdicts


def _bits(value: object) -> str:
    ok = isinstance(value, str) and 0 < len(value) <= MOST_IMAGES and not value.strip("01")
    return "" if ok else "it must be a text of 0 and 1, one per image"


def _numbers(value: object) -> str:
    ok = isinstance(value, str) and re.fullmatch(r"\d{1,9}( \d{1,9})*", value, re.ASCII)
    return "" if ok else "it must be a text of class numbers"


_RECORD = fields(
    name=NAME,
    serves=items(NAME, most=1000),
    accuracy=SHARE,
    spread=nothing_or(SHARE),
    worst_over_seeds=SHARE,
    n=whole(1, MOST_IMAGES),
    eps=number(0, 1e6),
    norm=one_of("linf", "l2"),
    steps=whole(0, 10**9),
    step_size=number(0, 1e6),
    loss=NAME,
    start=nothing_or(NAME),
    restarts=whole(0, 10**6),
    precision=NAME,
    seconds=_TIME,
    detail=fields(over=nothing_or(items(NAME, most=1000)), optional=("over",), others=anything),
    runs=items(fields(seed=SEED, accuracy=SHARE, seconds=_TIME, correct=_bits, others=anything), least=1, most=100_000),
    optional=("norm", "worst_over_seeds"),
    others=anything,
)

ABOUT = fields(
    data=nothing_or(text()),
    which=NAME,
    command=nothing_or(text()),
    classes=nothing_or(items(NAME, most=100_000)),
    facts=fields(
        epoch=nothing_or(whole()),
        step=nothing_or(whole()),
        model=fields(classes=nothing_or(items(NAME, most=100_000)), optional=("classes",), others=anything),
        optional=("epoch", "step", "model"),
        others=anything,
    ),
    optional=("data", "which", "command", "classes", "facts"),
    others=anything,
)


def _consistent(value: Any) -> str:
    """What fits in every record: one verdict per image, accuracies that the verdicts have, labels."""
    n = value["n"]
    for record in value["records"]:
        rights = [run["correct"].count("1") / n for run in record["runs"]]
        if record["n"] != n or any(len(run["correct"]) != n for run in record["runs"]):
            return f"{record['name']!r} does not have one verdict for each of {n} images"
        if abs(math.fsum(rights) / len(rights) - record["accuracy"]) > _NEAR:
            return f"the accuracy of {record['name']!r} is not that of its verdicts"
    if value.get("labels") is not None and value["labels"].count(" ") + 1 != n:
        return f"it does not have one label for each of {n} images"
    return ""


# The JSON of `evaluation.Result`.
RESULT = both(
    fields(
        format=one_of(1),
        n=whole(1, MOST_IMAGES),
        about=ABOUT,
        software=table(NAME, most=100),
        doubts=items(fields(name=NAME, why=text(), evidence=text(), others=anything), most=100),
        labels=nothing_or(_numbers),
        records=items(_RECORD, least=1, most=10_000),
        optional=("format", "labels"),
        others=anything,
    ),
    _consistent,
)
