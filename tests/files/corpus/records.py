"""Records as JSON: the files of a run, results of an evaluation, the description beside weights for a hub.

Sound ones are written by Sparring itself, so that their checksums are right; damage is done to the bytes, and to the
values with the JSON left whole.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_safetensors

import sparring
from sparring.data import load
from sparring.files.digests import SUM, sealed
from sparring.training import run_folder
from sparring.weights.export import export
from tests.files.corpus.cases import EITHER, READ, Case, device, fifo, forbidden, loop, unreadable, written

# Values that JSON may hold, and that no record has at most of its places.
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**400, 1e308, float("nan")),
    *("", "\x1b[2J\n", "9" * 5000, [], [[]], {}, {"": []}),
)
RESULT = f"{run_folder.EVALUATION}/quick.json"
FILES = (run_folder.CONFIG, run_folder.METRICS, run_folder.ENVIRONMENT, RESULT)
SPARSE = 3 * 2**30  # bytes of a file without content


@functools.cache
def sound() -> Path:
    """A folder with a run of two epochs, its evaluation, and its export for a hub."""
    folder = Path(tempfile.mkdtemp(prefix="corpus-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    digits = load("digits").train
    x, y = digits.x[:96], digits.y[:96]
    settings: dict[str, Any] = {"model": "tiny_cnn", "epochs": 2, "validation": 16, "batch_size": 40, "progress": False}
    model = sparring.train(
        objective=sparring.FAT(eps=0.1, step_size=0.02, steps=2),
        data=((x, y), (x[:8], y[:8])),
        out=folder / "run",
        device="cpu",
        **settings,
    )
    (folder / "run" / RESULT).parent.mkdir()
    sparring.evaluate(model, x[:8].float() / 255, y[:8], protocol="quick").save(folder / "run" / RESULT)
    export(folder / "run", folder / "hub", format="hub")
    # Weights without a description of their own: that of config.json counts.
    (folder / "hub" / "model.safetensors").write_bytes(to_safetensors(dict(model.state_dict())))
    return folder


def a_copy(whole: Path, name: str, place: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """The folder with another file in one place."""

    def write(folder: Path) -> Path:
        # Not changed by a case, so weights are linked and not copied.
        copy = shutil.copytree(whole, folder / "copy", copy_function=os.link)
        (copy / name).unlink()
        place((copy / name).parent)
        return copy

    return write


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside of a value, itself included."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


def without(value: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.copy(value)
    if len(path) == 1:
        del changed[path[0]]
    else:
        changed[path[0]] = without(value[path[0]], path[1:])
    return changed


def mutated(text: str, rng: random.Random) -> tuple[str, str]:
    """(what was done, the text): one value of the JSON, or of one of its lines, that is another or missing."""
    lines = text.splitlines() if "\n{" in text.strip() and text.startswith("{") and "\n  " not in text else [text]
    number = rng.randrange(len(lines))
    value = json.loads(lines[number])
    path = rng.choice(list(places(value)))
    if path and rng.random() < 0.3:
        changed, what = without(value, path), "missing"
    else:
        new = rng.choice(WRONG)
        changed, what = replaced(value, path, new), repr(new)[:20]
    if isinstance(changed, dict) and SUM in changed and rng.random() < 0.7:  # else its digest alone refuses it
        changed = sealed({name: each for name, each in changed.items() if name != SUM})
    lines[number] = json.dumps(changed)
    return f"{'.'.join(map(str, path)) or 'all of it'}: {what}", "\n".join(lines) + "\n"


def texts(name: str, whole: str) -> Iterator[tuple[str, Callable[[Path], Path]]]:
    """(what is wrong, writes the file)."""
    for what, content in {
        "nothing": b"",
        "half of it": whole.encode()[: len(whole) // 2],
        "null": b"null",
        "a list": b"[]",
        "a list of null": b"[null]",
        "an object": b"{}",
        "a number": b"7",
        "a text": b'"a"',
        "not UTF-8": b"\xff\xfe" + whole.encode("utf-16-le"),
        "null bytes": bytes(1000),
        "lists nested 100,000 times": b"[" * 100_000,
        "objects nested 100,000 times": b'{"a":' * 100_000,
        "closed lists nested 100,000 times": b"[" * 100_000 + b"]" * 100_000,
        "a number of 5,000 digits": b"1" * 5000,
        "twice": whole.encode() * 2,
        "a web page": b"<!doctype html><html></html>",
        "half of a pair": whole.replace('"', '"\\ud800', 1).encode(),
    }.items():
        yield what, written(name, content)
    rng = random.Random(name)
    for _ in range(16):
        what, text = mutated(whole, rng)
        yield what, written(name, text.encode())

    def sparse(folder: Path) -> Path:
        with (folder / name).open("wb") as file:
            file.truncate(SPARSE)
        return folder / name

    def directory(folder: Path) -> Path:
        (folder / name).mkdir()
        return folder / name

    yield "3 GB of null bytes", sparse
    yield "a folder", directory
    yield "a FIFO", fifo(name)
    yield "a loop of links", loop(name)
    yield "a device", device(name)
    yield "a file that cannot be read", unreadable(name)
    yield "a file that must not be opened", forbidden(name)


def run_cases(*names: str) -> Iterator[Case]:
    """A run with another file in one of these places; in every place unless some are named."""
    whole = sound() / "run"
    yield "sound", READ, a_copy(whole, names[0] if names else RESULT, _again(whole, names[0] if names else RESULT))
    for name in names or FILES:
        short = Path(name).name
        for what, place in texts(short, (whole / name).read_text(encoding="utf-8")):
            yield f"{short}: {what}", EITHER, a_copy(whole, name, place)


def result_cases() -> Iterator[Case]:
    whole = (sound() / "run" / RESULT).read_text(encoding="utf-8")
    yield "sound", READ, written("quick.json", whole.encode())
    for what, place in texts("quick.json", whole):
        yield what, EITHER, place


def hub_cases() -> Iterator[Case]:
    whole, name = sound() / "hub", "config.json"
    yield "sound", READ, a_copy(whole, name, _again(whole, name))
    for what, place in texts(name, (whole / name).read_text(encoding="utf-8")):
        yield what, EITHER, a_copy(whole, name, place)


def _again(whole: Path, name: str) -> Callable[[Path], Path]:
    return written(Path(name).name, (whole / name).read_bytes())
