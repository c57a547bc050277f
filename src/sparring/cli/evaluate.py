"""`sparring evaluate`: run protocols on a model; a table on the screen, JSON and verdicts in a folder."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.markdown import Markdown
from rich.table import Table
from torch import Tensor

from sparring import data, models, schedules, weights
from sparring.attacks.threat import Norm
from sparring.cli.arguments import name_model, named_again, parse
from sparring.cli.console import Screen, silent_unless
from sparring.cli.signals import stopped
from sparring.data import Dataset
from sparring.errors import UserError
from sparring.evaluation import PROTOCOLS, Result, evaluate
from sparring.evaluation.protocols import find
from sparring.evaluation.sanity.checks import WHY
from sparring.evaluation.sanity.explain import page
from sparring.files.json_text import Damaged, read_json
from sparring.files.leftovers import sweep
from sparring.files.schema import anything, fields, text
from sparring.training import run_folder
from sparring.training.checkpoint import read_facts, write_text
from sparring.training.distributed import Backend, World, joined, pick_device

DESCRIPTION = """Measure how well a model withstands attack. The same command continues an interrupted evaluation.

Examples:
  sparring evaluate runs/fat-digits-seed0
  sparring evaluate runs/x --protocol dat autoattack --limit 1000 --precision bf16
  sparring evaluate model.pth.tar --data cifar10 --protocol trades --seeds 3
  sparring evaluate model.pth.tar --data cifar10 --norm l2 --eps 0.5
  sparring evaluate --explain zero-gradients

Protocols:
""" + "\n".join(f"  {protocol.name:14} {protocol.about}" for protocol in PROTOCOLS.values())

_OF_A_MODEL = fields(
    about=fields(model=text(4000), others=anything), others=anything
)  # all that `_refuse_others` needs


@dataclass(frozen=True)
class Options:
    """What to evaluate, how, and where the results go."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run folder, a .safetensors file, a published .pt, .pth or .pth.tar, or a shipped model: fat-digits."""
    protocol: tuple[str, ...] = ("dat",)
    """One or several protocols; attacks that they share run once."""
    data: str | None = None
    """Test images: digits, cifar10, svhn, npz:FILE or folder:PATH; the data set of the run unless given."""
    limit: int | None = None
    """Evaluate on the first LIMIT images only."""
    eps: float | None = None
    """Another radius, in [0, 1] pixels (8/255); step sizes given relative to eps scale with it."""
    norm: Norm | None = None
    """linf, or l2, which needs --eps and scales every step size with it; that of the run unless given, else linf."""
    seeds: int = 1
    """Repeat attacks with a random start for this many seeds: mean and standard deviation."""
    seed: int = 0
    """The first seed."""
    restarts: int | None = None
    """Random starts per seed; an example counts as robust if it withstands all of them."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the gradients: bf16 is faster on a GPU. Verdicts are fp32 either way."""
    batch_size: int | None = None
    """The largest batch; as many images as fit unless given."""
    compiled: bool = False
    """torch.compile the bf16 copy of the model: worth the compile time for AutoAttack on a GPU."""
    doubts: bool = True
    """Check for signs that the numbers mislead."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    backend: Backend = "auto"
    """Of processes that torchrun has started: nccl on CUDA and gloo on CPUs, unless given."""
    which: Literal["last", "best"] = "last"
    """The checkpoint of a run folder."""
    model: str | None = None
    """The network, where it is your own (package.module:make), or can be neither read nor identified."""
    mean: tuple[float, ...] = ()
    """Means per channel of the normalisation, where the file has no such layer."""
    std: tuple[float, ...] = ()
    """Standard deviations, likewise."""
    out: Path | None = None
    """Folder for results and verdicts; RUN/evaluation, or evaluation/NAME for a file."""
    json: Path | None = None
    """Also write the JSON to this file."""
    explain: str | None = None
    """Print the page on a doubt and exit; `--explain list` lists the doubts. Needs no PATH."""


@dataclass(frozen=True)
class Explain:
    """`--explain` alone, which needs no model."""

    explain: str
    """The name of a doubt, or list."""


def run(argv: list[str]) -> int:
    """Run the command."""
    if any(word.partition("=")[0] == "--explain" for word in argv) and not {"-h", "--help"} & set(argv):
        words = [*argv, "list"] if argv == ["--explain"] else argv
        return _explain(parse(Explain, words, prog="sparring evaluate", description=DESCRIPTION).explain)
    asked = parse(Options, argv, prog="sparring evaluate", description=DESCRIPTION)
    device = pick_device(asked.device, asked.backend)
    with joined(device, asked.backend) as world, silent_unless(world.first):
        return _run(asked, device, world)


def _run(asked: Options, device: torch.device, world: World) -> int:
    with world.together():
        path, which = of_a_run(asked.path, asked.which)
        asked = replace(asked, path=path, which=which, protocol=tuple(dict.fromkeys(asked.protocol)))
        find(asked.protocol)  # a misspelt name fails before anything is read
        loaded, spec, images = open_subject(
            path,
            which=which,
            data_name=asked.data,
            device=device,
            model=asked.model,
            mean=asked.mean,
            std=asked.std,
        )
    asked = _threat_of(asked)
    with world.together():
        folder = open_results(asked.path, out=asked.out, json=asked.json, file=f"{_name(asked)}.json")
    own = [PROTOCOLS[name].limit for name in asked.protocol]
    own_limit = None if None in own else max(limit for limit in own if limit is not None)
    note_classes(images.test.y, asked.limit or own_limit or len(images.test))
    try:
        result = evaluate(
            loaded.model,
            images.test.x,
            images.test.y,
            asked.protocol,
            eps=asked.eps,
            norm=asked.norm or "linf",
            limit=asked.limit,
            seeds=asked.seeds,
            seed=asked.seed,
            restarts=asked.restarts,
            precision=asked.precision,
            batch_size=asked.batch_size,
            store=folder / "verdicts",
            doubts=asked.doubts,
            progress=True,
            compiled=asked.compiled,
            world=world,
            about={
                "model": str(asked.path),
                "which": asked.which,
                "command": _command(asked),
                "facts": loaded.facts,
                "data": spec,
                "data_note": images.note,
            },
        )
    except KeyboardInterrupt:
        failure = stopped("stopped. The same command continues where it stopped.")
        failure.elsewhere = None if not world.grouped else not world.first
        raise failure from None
    if not world.first:
        return 0
    files = [folder / f"{_name(asked)}.json", *([asked.json] if asked.json else [])]
    kept, trouble = [], None
    for path in files:
        try:
            write_text(path, result.to_json())
            kept.append(path)
        except (OSError, UserError) as error:  # the result is shown all the same
            trouble = error
    screen = Screen()
    screen.print(_measured(asked, result, len(images.test)), highlight=False, soft_wrap=True)
    screen.print(result.table())
    _note_radius(asked, loaded.facts, {record.eps for record in result if record.eps})
    for path in kept:
        print(f"wrote {path}")
    if trouble is not None:
        raise trouble
    return 0


def _explain(topic: str) -> int:
    """Print the page on a doubt, or the list of doubts."""
    screen = Screen()
    if topic == "list":
        table = Table("doubt", "why it matters", box=None, pad_edge=False)
        for name, why in WHY.items():
            table.add_row(name, why)
        screen.print(table)
        screen.print("\nThe page on one of them: sparring evaluate --explain NAME", highlight=False)
        return 0
    screen.print(Markdown(re.sub(r"\[([\w-]+)\]\(\1\.md\)", r"`\1`", page(topic))))
    return 0


def _measured(asked: Options, result: Result, images: int) -> str:
    """The subject of the table: the weights, the images, the protocols and the device."""
    facts = result.about["facts"]
    stage = [f"{asked.which} checkpoint"] if asked.path.is_dir() else []
    stage += [] if facts.get("epoch") is None else [run_folder.stage(facts)]
    model = f"{asked.path} ({', '.join(stage)})" if stage else str(asked.path)
    radii = {name: PROTOCOLS[name].eps if asked.eps is None else asked.eps for name in asked.protocol}
    how = " and ".join(
        f"{name} at eps {schedules.radius_text(eps, asked.norm or 'linf')}" for name, eps in radii.items()
    )
    data = result.about["data"]
    return f"{model} on {result.n} of {images} test images of {data}; protocol {how}; {result.software['device']}"


def _note_radius(asked: Options, facts: Mapping[str, Any], measured: set[float]) -> None:
    """Print a note where the run was trained for another radius than the protocols use."""
    if asked.eps is not None:
        return
    try:
        objective = run_folder.open_run(asked.path).config.objective
    except UserError:  # not a run, or its configuration cannot be read
        trained, norm = (facts.get("threat") or {}).get("eps"), (facts.get("threat") or {}).get("norm", "linf")
        if not isinstance(trained, float):
            return
    else:
        trained, norm = objective.radius, objective.norm
    if norm != asked.norm:
        print(f"note: trained in {norm}, measured in {asked.norm}.")
    elif all(abs(eps - trained) > 1e-3 for eps in measured):
        eps = schedules.spell(trained)
        print(f"note: trained for eps {eps}, measured at {max(measured):.4g}. To measure at {eps}: --eps {eps}.")


def _threat_of(asked: Options) -> Options:
    """The options with the norm that the run was trained in; and its radius, where the protocols have none for it."""
    try:
        trained = run_folder.open_run(asked.path).config.objective
    except UserError:  # not a run, or its configuration cannot be read
        return asked
    norm = asked.norm or trained.norm
    if norm == "linf" or asked.eps is not None or trained.norm != norm:
        return replace(asked, norm=norm)
    print(f"note: measured as it was trained, in the ball of radius {trained.radius:.4g} in {norm}.")
    return replace(asked, norm=norm, eps=trained.radius)


def of_a_run(path: Path, which: weights.Which) -> tuple[Path, weights.Which]:
    """The run folder of a checkpoint that was named as a file: other runs have files of the same name."""
    own: dict[str, weights.Which] = {run_folder.LAST: "last", run_folder.BEST: "best"}
    if path.name in own and (path.parent / run_folder.CONFIG).is_file():
        return path.parent, own[path.name]
    return path, which


def open_subject(
    path: Path,
    *,
    which: weights.Which,
    data_name: str | None,
    device: torch.device,
    model: str | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> tuple[weights.Loaded, str, Dataset]:
    """Open what a command measures: the model, the name of its data set, the data set."""
    if bool(mean) != bool(std):
        raise UserError("--mean and --std go together. Give both, one number per channel in each.")
    name_model(model)
    _note_unfinished(path)
    loaded = weights.load(
        path,
        model=model,
        **_sizes(path, which, model, data_name),
        normalize=(mean, std) if mean else None,
        which=which,
        device=device,
    )
    for note in loaded.notes:
        print(f"note: {note}")
    if mean and "recipe" in loaded.facts:
        raise UserError(f"{path} is Sparring's own file and contains its normalisation. Leave out --mean and --std.")
    spec = data_name or _where_now(path) or loaded.facts.get("data")
    if not isinstance(spec, str):
        raise UserError(f"{path} does not record which data it was trained on. Give it: --data cifar10.")
    try:
        images = data.load(spec)
    except UserError as error:
        if data_name is not None:
            raise
        raise UserError(
            f"{error} ({path} was trained on {spec}; if that has moved, give its place with --data.)"
        ) from None
    _fit(loaded.facts["model"], images, path, sized="recipe" in loaded.facts)
    images = _for_testing(path, images, elsewhere=data_name is not None)
    if spec.startswith(("folder:", "npz:")):
        print(f"note: {images.note}.")
    return loaded, spec, images


def _sizes(path: Path, which: weights.Which, model: str | None, data_name: str | None) -> dict[str, Any]:
    """What the user's own network is made for, where a published file does not record it: that of the data."""
    if model is None or data_name is None or models.built_in(model) or "model" in weights.facts(path, which=which):
        return {}
    images = data.load(data_name)
    return {"num_classes": images.num_classes, "channels": images.channels, "size": images.size}


def _for_testing(path: Path, images: Dataset, *, elsewhere: bool) -> Dataset:
    """The images to test on: all but the training images, where the data set has no test images of its own."""
    try:
        run = run_folder.open_run(path)
    except UserError:  # not a run, or its configuration cannot be read
        return images
    trained_on = run.images.partition("+")[0]  # without its extra images
    if not trained_on or trained_on == images.fingerprint:
        return images
    if not elsewhere:
        print(
            f"note: the images of {images.name} have changed since {path} was trained; the test images may include "
            "images it was trained on."
        )
        return images
    if not images.carved:
        return images
    try:
        own = data.load(run.config.data)
    except UserError:
        return images  # the training images are unknown
    return data.whole(images, without=data.in_memory(own.train)) if own.fingerprint == trained_on else images


def _where_now(path: Path) -> str | None:
    """The data of a run folder: its configuration is updated when the data move, its checkpoints are not."""
    try:
        return run_folder.open_run(path).config.data
    except UserError:
        return None


def note_classes(y: Tensor, n: int) -> None:
    """Print a note where the first n images lack classes, or where one class dominates."""
    first = Counter(y[:n].tolist())
    every = len(set(y.tolist()))
    if len(first) < every:
        print(f"note: the first {n} of {len(y)} test images hold {len(first)} of {every} classes.")
    most = max(first.values(), default=0) / max(1, sum(first.values()))
    if len(first) > 1 and most >= max(0.5, 1.5 / len(first)):
        print(f"note: {most:.1%} of these images are of one class: always predicting it reaches that accuracy.")


def _note_unfinished(path: Path) -> None:
    """Print a note where the run has not finished training."""
    with suppress(UserError):  # not a run, or its configuration cannot be read: the weights may be good
        config = run_folder.open_run(path).config
        epochs = config.epochs
        done = read_facts(path / run_folder.LAST).get("epoch", 0)
        if done < epochs:
            again = shlex.join(["sparring", "train", "--out", str(path), "--resume", *named_again(config.model)])
            print(f"note: {path} has trained {done} of {epochs} epochs. To finish it: {again}")


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


def _fit(model: dict[str, object], images: Dataset, path: Path, *, sized: bool) -> None:
    """Refuse images that do not fit the model; sizes are compared only where the file records its own (`sized`)."""
    for what, own, given in (
        ("classes", model.get("num_classes"), images.num_classes),
        ("colour channels", model.get("channels"), images.channels),
    ):
        if own is not None and own != given:
            raise UserError(
                f"{path} was made for {own} {what}, {images.name} has {given}. Give its own data set with --data."
            )

    size = model.get("size")
    if sized and isinstance(size, list) and tuple(size) != images.size:
        (height, width), other = size, "x".join(map(str, images.size))
        raise UserError(
            f"{path} was made for images of {height}x{width}, those of {images.name} are {other}. "
            f"A folder's are scaled with folder:PATH?size={height}."
        )
    own_names = model.get("classes")
    if isinstance(own_names, list) and own_names != list(images.classes):
        at = next(i for i, pair in enumerate(zip(own_names, images.classes, strict=True)) if pair[0] != pair[1])
        raise UserError(
            f"{path} was made for other classes: its class {at} is {own_names[at]!r}, that of {images.name} "
            f"{images.classes[at]!r}. Give its own data set with --data."
        )


def _folder(path: Path) -> Path:
    return (
        path / run_folder.EVALUATION
        if path.is_dir()
        else Path("evaluation") / re.sub(r"(\.(pth?|tar|safetensors))+$", "", path.name)
    )


def _name(asked: Options) -> str:
    """A file name that distinguishes evaluations: the protocols, and every option that is not at its default."""
    parts = ["+".join(asked.protocol)]
    parts += [data_word(asked.data)] if asked.data is not None else []
    parts += [asked.norm] if asked.norm not in (None, "linf") else []
    parts += [f"eps{schedules.spell(asked.eps)}"] if asked.eps is not None else []
    for name, values in (("mean", asked.mean), ("std", asked.std)):
        parts += [name + "_".join(map(schedules.spell, values))] if values else []
    for name in ("limit", "seeds", "seed", "restarts", "precision", "which"):
        value = getattr(asked, name)
        if value != Options.__dataclass_fields__[name].default:
            parts.append(f"{value}" if isinstance(value, str) else f"{name}{value}")
    return "-".join(parts)


def _command(asked: Options) -> str:
    """The command that repeats the evaluation of MODEL: every option that decides what is measured."""
    words = ["sparring", "evaluate", "MODEL", "--protocol", *asked.protocol]
    if asked.data is not None:
        words += ["--data", asked.data if ":" not in asked.data else f"{asked.data.partition(':')[0]}:PATH"]
    for name in ("eps", "limit", "seeds", "seed", "restarts", "precision"):
        value = getattr(asked, name)
        if value != Options.__dataclass_fields__[name].default:
            words += [f"--{name}", schedules.spell(value) if isinstance(value, float) else str(value)]
    return shlex.join(words)


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
