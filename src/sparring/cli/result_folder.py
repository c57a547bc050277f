"""Where a command writes its results: a folder that can be written to, and that holds no other model's results."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from sparring.errors import UserError
from sparring.files.json_text import Damaged, read_json
from sparring.files.leftovers import sweep
from sparring.files.schema import anything, fields, text
from sparring.training import run_folder

_OF_A_MODEL = fields(about=fields(model=text(4000), others=anything), others=anything)  # whose result it is


def open_results(path: Path, *, out: Path | None, json: Path | None, file: str) -> Path:
    """The folder for results, created before the work, so that nothing is measured that cannot be saved.

    `file` is the result file; in a folder named by the user it must not belong to another model.
    """
    folder = out or _folder(path)
    make_folder(folder, "--out")
    if out is not None:
        _refuse_others(folder, path, [folder / file])
    elif not path.is_dir():
        _refuse_others(folder, path, sorted(folder.glob("*.json")))
    if json:
        make_folder(json.parent, "--json")
        if json.is_dir():
            raise UserError(f"{json} is a folder. Give a file: --json {json / 'result.json'}.")
        sweep(json.parent, json.name.__eq__)
    # A folder that the user named may hold what others write; the one beside a model is ours.
    sweep(folder, lambda name: name.endswith(".json") if out is None else name == file)
    return folder


def _refuse_others(folder: Path, path: Path, results: Iterable[Path]) -> None:
    """Refuse a folder with another model's results: models of the same name would share it."""
    for result in results:
        if not result.exists():
            continue
        try:
            found = read_json(result, _OF_A_MODEL)
        except Damaged:  # nothing says whose it is
            continue
        other = Path(found["about"]["model"])
        if _exists(other) and other.resolve() != path.resolve():
            raise UserError(f"{folder} holds results of {other}. Choose another folder for those of {path}: --out.")


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder; a name that no file can have is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _folder(path: Path) -> Path:
    return (
        path / run_folder.EVALUATION
        if path.is_dir()
        else Path("evaluation") / re.sub(r"(\.(pth?|tar|safetensors))+$", "", path.name)
    )


def data_word(data: str) -> str:
    """A data set in a file name: a path is shortened, and a digest keeps different paths apart."""
    word = re.sub(r"[^\w.=]+", "-", data)
    path = data.startswith(("folder:", "npz:")) or len(word) > 60
    return f"{word[:60]}-{hashlib.sha256(data.encode()).hexdigest()[:8]}" if path else word


def make_folder(folder: Path, flag: str) -> None:
    """Create a folder for output before the work starts, so that nothing is computed that cannot be saved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder}: {error.strerror}. Choose another with {flag}.") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"the folder {folder} is not writable. Choose another with {flag}.")
