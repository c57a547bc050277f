"""What the file of a result must look like: all that tables, figures and notes rely on, by the kind of the measure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparring.files.result_json import MOST_IMAGES, NAME, SEED, SHARE
from sparring.files.schema import (
    Check,
    anything,
    both,
    fields,
    having,
    items,
    nothing_or,
    number,
    one_of,
    table,
    text,
    whole,
)

_TIME = number(0, 1e12)  # seconds
_PLACE = fields(device=NAME, torch=NAME, at_once=nothing_or(whole()), optional=("at_once",), others=anything)
_POINT = items(number(-1e15, 1e15), least=2, most=2)
_SETS = ("natural", "pgd", "friendly")
_HISTORY = fields(
    epoch=items(whole(1)),
    seconds=items(_TIME),
    backprops=items(number(0, 1e9)),
    optional=("epoch", "seconds", "backprops"),
    others=items(anything),
)
_ATTACKS = table(
    fields(accuracy=SHARE, n=whole(1, MOST_IMAGES), right=text(MOST_IMAGES), optional=("right",), others=anything)
)
_MIXED = having(("purity", "foreign", "amidst"), SHARE)
_DOUBT = fields(why=text(), others=anything)


def unpack(packed: str, count: int) -> bytes:
    """The inverse of `results.pack`: one byte per image, 1 = classified correctly."""
    bits = base64.b64decode(packed, validate=True)
    if len(bits) != -(-count // 8):  # numpy would pad or truncate
        raise ValueError(f"{len(bits)} bytes cannot hold one bit for each of {count} images")
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).tobytes()


def _robustness(measure: Mapping[str, Any]) -> Check:
    return both(
        fields(
            attacks=_ATTACKS,
            doubts=items(_DOUBT, most=1000),
            best=fields(epoch=nothing_or(whole()), attacks=_ATTACKS, others=anything),
            optional=("doubts", "best"),
            others=anything,
        ),
        _agreeing,
    )


def _agreeing(found: Any) -> str:
    """Accuracies that are those of their images, and at the best epoch the same attacks but AutoAttack."""
    best = found.get("best", {"attacks": found["attacks"]})["attacks"]
    if missing := found["attacks"].keys() - {"autoattack"} - best.keys():
        return f"its best epoch has no {min(missing)!r}"
    for name, one in (*found["attacks"].items(), *best.items()):
        try:
            agrees = "right" not in one or sum(unpack(one["right"], one["n"])) == round(one["accuracy"] * one["n"])
        except (ValueError, binascii.Error):
            agrees = False
        if not agrees:
            return f"the accuracy of {name!r} is not that of its images"
    return ""


def _mixture(measure: Mapping[str, Any]) -> Check:
    layers = tuple(str(layer) for layer in measure["layers"])
    sets = having(_SETS, items(_POINT, least=1))
    return both(
        fields(
            n=whole(),
            labels=items(whole(0, len(measure["classes"]) - 1), least=1),
            mixing=having(layers, having(_SETS, _MIXED)),
            points=having(layers, fields(pca=sets, tsne=sets)),
            others=anything,
        ),
        lambda found: _paired(found, _sets(found, layers)),
    )


def _motivation(measure: Mapping[str, Any]) -> Check:
    steps, kinds = measure["steps"] + 1, ("pgd", "friendly")
    mixed = having(("wrong", "purity", "foreign", "amidst"), SHARE)
    return both(
        fields(
            n=whole(),
            labels=items(whole(0, 1), least=1),
            probability=items(items(SHARE, least=2, most=10_000), least=2, most=10_000),
            paths=having(kinds, items(items(_POINT, least=1), least=steps, most=steps)),
            mixing=having(kinds, items(mixed, least=steps, most=steps)),
            others=anything,
        ),
        lambda found: _paired(found, _steps(found)),
        _square,
    )


def _sets(found: Any, layers: tuple[str, ...]) -> list[list[Any]]:
    return [planes[name] for layer in layers for planes in found["points"][layer].values() for name in _SETS]


def _steps(found: Any) -> list[list[Any]]:
    return [points for kind in ("pgd", "friendly") for points in found["paths"][kind]]


def _paired(found: Any, sets: list[list[Any]]) -> str:
    same = all(len(points) == len(found["labels"]) for points in sets)
    return "" if same else "it does not have one label for each point"


def _square(found: Any) -> str:
    rows = found["probability"]
    return "" if all(len(row) == len(rows) for row in rows) else "probability must have as many columns as rows"


def _losses(measure: Mapping[str, Any]) -> Check:
    bits = number(-1e9, 1e9)
    perhaps = number(-1e9, 1e9, finite=False)  # NaN: the attack fooled no image
    return fields(
        n=whole(),
        mean_loss_bits=having(_SETS, bits),
        mean_loss_bits_where_fooled=having(_SETS, perhaps),
        bound=having(("risk", "min_min", "min_max"), bits),
        points=having(_SETS, items(_POINT, least=1)),
        others=anything,
    )


_FOUND = {"robustness": _robustness, "mixture": _mixture, "motivation": _motivation, "losses": _losses}
_MEASURE = {
    "mixture": fields(
        classes=items(NAME, least=1, most=4), layers=items(whole(1), least=1, most=1000), others=anything
    ),
    "motivation": fields(steps=whole(1, 10_000), shown=items(whole(), least=1, most=100), others=anything),
}
_WHOLE = fields(
    item=NAME,
    row=NAME,
    scale=one_of("lite", "full"),
    seed=SEED,
    state=one_of("missing", "interrupted", "trained", "measured", "diverged"),
    config=nothing_or(table(anything)),
    measure=fields(kind=NAME, others=anything),
    environment=_PLACE,
    found=table(anything),
    history=_HISTORY,
    training_seconds=_TIME,
    wall_seconds=nothing_or(_TIME),
    starts=nothing_or(whole()),
    trained_on=nothing_or(items(_PLACE, most=100_000)),
    peak_memory_gib=nothing_or(number(0, 1e9)),
    diverged_in_epoch=whole(),
    optional=(
        *("item", "found", "history", "training_seconds", "wall_seconds", "starts", "trained_on"),
        *("peak_memory_gib", "diverged_in_epoch"),
    ),
    others=anything,
)


def check(result: object) -> str:
    """What is wrong with the content of a file; '' if tables and figures can rely on it."""
    if wrong := _WHOLE(result):
        return wrong
    assert isinstance(result, dict)
    return _course(result) or _measured(result)


def _course(result: Mapping[str, Any]) -> str:
    """A training leaves a history with one entry per epoch in each of its columns."""
    if result["config"] is None:
        return ""
    history = result.get("history")
    if history is None or "training_seconds" not in result:
        return "it has no 'history' of its training" if history is None else "it has no 'training_seconds'"
    if len({len(column) for column in history.values()}) > 1:
        return "the columns of its history differ in length"
    done = result["state"] in ("measured", "trained")
    needed = ("epoch", "seconds", "backprops") if done else ("epoch", "seconds") if history else ()
    if missing := [name for name in needed if not history.get(name)]:
        return f"its history has no {missing[0]!r}"
    if result["state"] == "diverged" and "diverged_in_epoch" not in result:
        return "it has no 'diverged_in_epoch'"
    return ""


def _measured(result: Mapping[str, Any]) -> str:
    """What was found is what the kind of the measure finds."""
    if result["state"] != "measured":
        return ""
    measure = result["measure"]
    kind = measure["kind"]
    if "found" not in result:
        return "it has no 'found'"
    if kind in _MEASURE and (wrong := _MEASURE[kind](measure)):
        return f"measure: {wrong}"
    if kind == "motivation" and max(measure["shown"]) > measure["steps"]:
        return "measure: it shows a step that is not there"
    wrong = _FOUND[kind](measure)(result["found"]) if kind in _FOUND else ""
    return f"found: {wrong}" if wrong else ""
