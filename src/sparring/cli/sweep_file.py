"""The file of a sweep: recipes x overrides x seeds in TOML, read into the runs that `sparring train` would make.

recipe = "fat-digits"            # or a list
seeds = [0, 1, 2]
out = "runs/sweeps/tau"          # runs/sweeps/FILE unless given

[set]                            # the same in every run: flags of `sparring train` without their dashes
epochs = 10

[grid]                           # every combination of these
attack.tau = [0, 1, 3]
lr = [0.1, 0.05]
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring import models, recipes
from sparring.cli.arguments import name_model
from sparring.cli.train import folder_name, options_of
from sparring.data import Rows, Split, divide, load
from sparring.errors import UserError, did_you_mean
from sparring.files.json_text import read_text
from sparring.launch import Unit
from sparring.models.own import is_import_path
from sparring.seeds import check_seed
from sparring.training import run_folder
from sparring.training.checkpoint import read_facts
from sparring.training.config import Config, differences, same
from sparring.training.resume import finished

_MOST = 2**20  # bytes of a file
_KNOWN = ("recipe", "seeds", "out", "set", "grid")
# Flags of `sparring train` that a sweep sets itself, and where they are said instead.
_ELSEWHERE = {
    "seed": "Write seeds = [0, 1] at the top of the file",
    "out": 'Write out = "runs/sweeps/NAME" at the top of the file',
    "resume": "Leave it out: a sweep resumes what was interrupted",
    "overwrite": "Delete the folder of a run to train it again",
    "device": "Write sparring sweep FILE --device",
}
_NOT_OF_THE_RUN = ("engine", "tensorboard", "track")  # flags that do not change what is computed
_Value = str | int | float | bool


@dataclass(frozen=True)
class Sweep:
    """What the file says."""

    path: Path
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    fixed: Mapping[str, _Value]
    grid: Mapping[str, Sequence[_Value]]


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    unit: Unit
    folder: Path
    config: Config

    @property
    def finished(self) -> bool:
        """Whether its folder holds it, finished."""
        return (self.folder / run_folder.CONFIG).exists() and finished(self.folder, self.config)

    @property
    def state(self) -> str:
        """'finished', 'at epoch 2 of 30', 'not started'."""
        if self.finished:
            return "finished"
        if not (self.folder / run_folder.CONFIG).exists():
            return "not started"
        facts = read_facts(self.folder / run_folder.LAST)
        return f"at {run_folder.stage({'epoch': 0} | facts)} of {self.config.epochs}"


def read(path: Path) -> Sweep:
    """The sweep in a file.

    Raises:
        UserError: in one line, what is wrong with it.
    """
    try:
        if not path.exists():
            raise UserError(f"there is no file {path}. Write one as in `sparring sweep --help`.")
        found = tomllib.loads(read_text(path, most=_MOST, fix="Write one as in `sparring sweep --help`."))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}. Text needs quotes: lr = 'cosine:0.1'.") from None
    except RecursionError:
        raise UserError(f"{path} is not a sweep: it is nested too deeply. Write one list per value.") from None
    for key in found:
        if key not in _KNOWN:
            where = "" if did_you_mean(key, _KNOWN) else " An override belongs below [set] or [grid]."
            raise UserError(
                f"{path}: unknown key {key!r}.{did_you_mean(key, _KNOWN)}{where} Known: {', '.join(_KNOWN)}."
            )
    fixed, grid = (_overrides(path, name, found.get(name, {})) for name in ("set", "grid"))
    for key in fixed.keys() & grid.keys():
        raise UserError(f"{path}: {key} is in [set] and in [grid]. Leave it in one of them.")
    out = found.get("out", f"runs/sweeps/{path.stem}")
    if not isinstance(out, str) or not out:
        raise UserError(f'{path}: out must be a folder, got {_shown(out)}. Write for example out = "runs/sweeps/tau".')
    named = _recipes(path, found.get("recipe"))
    return Sweep(path, named, _seeds(path, found.get("seeds", [0])), Path(out), fixed, grid)


def runs(sweep: Sweep, *, device: str = "auto") -> list[Run]:
    """Every run of a sweep, each parsed as `sparring train` parses it, with networks, data and folders checked.

    Raises:
        UserError: naming the key and the value of the first that is not allowed.
    """
    found: dict[str, Run] = {}
    for recipe, values, seed in itertools.product(sweep.recipes, _combinations(sweep.grid), sweep.seeds):
        run = _run(sweep, recipe, {**sweep.fixed, **values}, seed, device)
        other = found.setdefault(run.unit.name, run)
        if other is not run:
            alike = "the same run twice" if same(run.config, other.config) else "two runs with one name"
            raise UserError(f"{sweep.path}: {alike}, {run.unit.name}. Leave out one of its values.")
    planned = list(found.values())
    _check_data(sweep, [run.config for run in planned])
    for run in planned:
        _check_folder(run)
    return planned


def _recipes(path: Path, given: Any) -> tuple[str, ...]:
    named = [given] if isinstance(given, str) else given
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        got = "it is missing" if given is None else f"got {_shown(given)}"
        raise UserError(
            f"{path}: recipe must be the name of a recipe, or a list of names; {got}. Write for example "
            'recipe = "fat-digits".'
        )
    for name in named:
        try:
            recipes.find(name)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return tuple(dict.fromkeys(named))


def _seeds(path: Path, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not given or not all(type(seed) is int for seed in given):
        raise UserError(f"{path}: seeds must be a list of whole numbers, got {_shown(given)}. Write seeds = [0, 1, 2].")
    for seed in given:
        try:
            check_seed(seed)
        except UserError as error:
            raise UserError(f"{path}: seeds: {error}") from None
    return tuple(dict.fromkeys(given))


def _overrides(path: Path, name: str, given: Any) -> dict[str, Any]:
    """The keys of [set] or [grid] in one level (attack.tau), with values of the right kind."""
    if not isinstance(given, dict):
        raise UserError(f"{path}: {name} must be a table, got {_shown(given)}. Write [{name}] on a line of its own.")
    found: dict[str, Any] = {}
    for key, value in _flat(given):
        flag = key.replace("-", "_")
        if flag in _ELSEWHERE:
            raise UserError(f"{path}: {key} does not belong below [{name}]. {_ELSEWHERE[flag]}.")
        if flag in found:
            raise UserError(f"{path}: [{name}] has {key} twice. Leave out one.")
        if name == "grid" and flag in _NOT_OF_THE_RUN:
            raise UserError(f"{path}: {key} does not change what is computed. Write it below [set].")
        several = isinstance(value, list)
        if name == "grid" and (not several or not value):
            raise UserError(
                f"{path}: [grid] {key} must be a list of values, got {_shown(value)}. A single one belongs below [set]."
            )
        if name == "set" and several:
            raise UserError(f"{path}: [set] {key} must be one value, got {_shown(value)}. A list belongs below [grid].")
        for each in value if several else [value]:
            if not isinstance(each, str | int | float):  # True is an int; a date or a list is none
                raise UserError(f"{path}: {key} = {_shown(each)} must be text, a number, true or false.")
        found[flag] = value
    return found


def _flat(nested: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _combinations(grid: Mapping[str, Sequence[_Value]]) -> Iterator[dict[str, _Value]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _run(sweep: Sweep, recipe: str, overrides: Mapping[str, _Value], seed: int, device: str) -> Run:
    """One run, parsed."""
    config = _parsed(sweep, recipe, overrides, seed)
    folder = sweep.out / folder_name(recipe, config)
    words = ["train", recipe, *_flags(overrides), f"--seed={seed}", f"--out={folder}", "--resume"]
    words += [f"--device={device}"] if device != "auto" else []
    return Run(Unit(folder.name, tuple(words)), folder, config)


def _parsed(sweep: Sweep, recipe: str, overrides: Mapping[str, _Value], seed: int) -> Config:
    try:
        return _config(recipe, overrides, seed)
    except UserError as error:
        key, error = _culprit(recipe, overrides, error)
        inside = f" in {recipe}" if len(sweep.recipes) > 1 else ""
        blamed = f"{key} = {_shown(overrides[key])}{inside}: " if key else ""
        raise UserError(f"{sweep.path}: {blamed}{error}") from None


def _config(recipe: str, overrides: Mapping[str, _Value], seed: int = 0) -> Config:
    """What `sparring train` would train; its network is known, or can be imported."""
    config = options_of([recipe, *_flags(overrides), f"--seed={seed}"])[1].config
    if is_import_path(config.model):
        name_model(config.model)
    models.describe(config.model)
    return config


def _culprit(recipe: str, overrides: Mapping[str, _Value], error: UserError) -> tuple[str, UserError]:
    """The override without which the run is allowed; of several faults, the first in the order of the file."""
    for key in overrides:
        if _fault(recipe, {name: value for name, value in overrides.items() if name != key}) is None:
            return key, error
    so_far: dict[str, _Value] = {}
    for key in sorted(overrides, key=lambda key: key != "objective"):  # whose parameters the others may be
        so_far[key] = overrides[key]
        if fault := _fault(recipe, so_far):
            return key, fault
    return "", error


def _fault(recipe: str, overrides: Mapping[str, _Value]) -> UserError | None:
    try:
        _config(recipe, overrides)
    except UserError as error:
        return error
    return None


def _flags(overrides: Mapping[str, _Value]) -> list[str]:
    """The flags of `sparring train`: --attack.tau=3, --no-normalize."""
    words = []
    for key, value in overrides.items():
        above, dot, name = key.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{above}{dot}{'' if value else 'no-'}{name}")
        else:
            words.append(f"--{above}{dot}{name}={value}")
    return words


def _check_data(sweep: Sweep, configs: Sequence[Config]) -> None:
    """Refuse images that are not there, and more validation images than there are."""
    for name in dict.fromkeys(config.data for config in configs):
        with _blaming(sweep, "data", name):
            images = load(name).train
        for count in dict.fromkeys(config.validation for config in configs if config.data == name):
            with _blaming(sweep, "validation", count):
                if isinstance(images, Split | Rows):
                    divide(images, count, seed=0)


@contextmanager
def _blaming(sweep: Sweep, key: str, value: _Value) -> Iterator[None]:
    """Begin the message of an error with the key and the value that it comes from."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{sweep.path}: {key} = {_shown(value)}: {error}") from None


def _check_folder(run: Run) -> None:
    """Refuse a folder that holds another run."""
    if (run.folder / run_folder.CONFIG).exists():
        changed = differences(run_folder.open_run(run.folder).config, run.config)
        if changed:
            raise UserError(f"{run.folder} holds another run ({'; '.join(changed)}). Choose another `out`.")


def _shown(value: object) -> str:
    """A value as it is written in TOML."""
    return json.dumps(value, ensure_ascii=False, default=str)
