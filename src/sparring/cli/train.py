"""`sparring train`: trains a recipe with overrides into a run folder."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from sparring import models, recipes, schedules
from sparring.cli.arguments import parse
from sparring.cli.console import let_go
from sparring.cli.progress import TrainingBar
from sparring.cli.recipes import PROTOCOLS
from sparring.cli.signals import stopped, stopping
from sparring.data import Dataset, load
from sparring.engine import EngineKind
from sparring.errors import RunFailed, UserError, unknown
from sparring.objectives import OBJECTIVES, Objective
from sparring.training import run_folder
from sparring.training.checkpoint import read_facts
from sparring.training.config import Config, with_objective
from sparring.training.loop import Interrupted, pick_device, train

DESCRIPTION = """Train a model by a recipe; any part of the recipe can be replaced.

Examples:
  sparring train fat-digits
  sparring train fat-cifar10-resnet18 --epochs 30 --attack.eps 8/255 --seed 3
  sparring train fat-cifar10-resnet18 --data folder:my-images --validation 100 --epochs 30
  sparring train --out runs/fat-digits-seed0 --resume

Recipes: sparring recipes"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run computes, and where and how it happens."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run folder; runs/RECIPE-seedN unless given."""
    resume: bool = False
    """Continue the run in the folder, if it holds one."""
    overwrite: bool = False
    """Replace a run that is already in the folder."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    engine: EngineKind = "auto"
    """auto takes captured graphs and bf16 where CUDA is; plain is the reference."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""


def run(argv: list[str]) -> int:
    """The command."""
    recipe, options = _options(argv)
    wanted = options.config
    folder = options.out or _folder(recipe, wanted)
    device = pick_device(options.device)
    data = _data(wanted, resume=options.resume)
    again = f"Continue with: {_again(folder, options)}"
    before = _written(folder)
    try:
        print(
            f"{wanted.objective.name} on {data.name} ({len(data.train)} training and {len(data.test)} test images, "
            f"{data.num_classes} classes) -> {folder}"
        )
        if options.resume and _finished(folder, wanted):
            print(f"already finished: {wanted.epochs} of {wanted.epochs} epochs.")
        else:
            for note in (*_of_ones_own(data, wanted.data), *_notes(wanted, data, device)):
                print(f"note: {note}")
        with stopping() as stop:
            train(
                wanted,
                folder,
                recipe=recipe,
                resume=options.resume,
                overwrite=options.overwrite,
                device=device,
                data=data,
                tracker=TrainingBar(),
                stop=stop,
                tensorboard=options.tensorboard,
                engine=options.engine,
            )
    except Interrupted as interrupted:
        raise stopped(f"{interrupted}. {again}") from None
    except KeyboardInterrupt:
        if not options.resume and _written(folder) == before:
            raise stopped("interrupted before the run was started.") from None
        raise stopped(f"interrupted; the steps since the last checkpoint are lost. {again}") from None
    except BrokenPipeError:
        let_go()
        raise RunFailed(f"stopped, because the output pipe was closed. {again}") from None
    _summary(folder)
    return 0


def _written(folder: Path) -> int:
    """When the run in a folder was started, 0 for none: two runs differ in it."""
    config = folder / run_folder.CONFIG
    return config.stat().st_mtime_ns if config.exists() else 0


def _data(wanted: Config, *, resume: bool) -> Dataset:
    try:
        return load(wanted.data)
    except UserError as error:
        if not resume:
            raise
        raise UserError(f"{error} If the images have moved, give their path: --data.") from None


def _of_ones_own(data: Dataset, spec: str) -> list[str]:
    """How the user's own images were read: split, scaled, left out."""
    return [f"{data.note}."] if spec.startswith(("folder:", "npz:")) else []


def _finished(folder: Path, wanted: Config) -> bool:
    """Whether the folder holds this run, finished."""
    done = read_facts(folder / run_folder.LAST).get("epoch", 0)
    return done >= wanted.epochs and run_folder.open_run(folder).config == wanted


def _folder(recipe: str, wanted: Config) -> Path:
    """runs/RECIPE-seedN; with other data than the recipe's, their name is in it too."""
    known = recipes.RECIPES.get(recipe)
    other = ""
    if known is not None and wanted.data != known.config.data:
        other = f"-{Path(wanted.data.partition('?')[0].rpartition(':')[2]).stem}"
    return Path("runs") / f"{recipe or 'run'}{other}-seed{wanted.seed}"


def _notes(config: Config, data: Dataset, device: torch.device) -> Iterator[str]:
    """Settings that are allowed but probably not intended."""
    eps = config.objective.radius
    yield from config.objective.advice(config.epochs)
    if eps and not 0.49 * eps < config.validation_eps < 2.01 * eps:  # the paper trains at 16/255, measures at 8/255
        yield (
            f"validation and the best epoch are judged at eps {config.validation_eps:.3g}, training is at {eps:.3g}; "
            "another: --validation-eps."
        )
    if late := schedules.start_after(config.lr, config.epochs):
        yield f"--lr {config.lr}: @{late} lies after the last epoch ({config.epochs})."
    days = _days_on_a_cpu(config, data)
    if device.type == "cpu" and days > 1:
        yield f"on a CPU this takes about {days:,.0f} days. Use a GPU, fewer --epochs, or a smaller --model."


def _days_on_a_cpu(config: Config, data: Dataset) -> float:
    """A rough estimate: an input gradient costs two forward passes, an update three."""
    forward = models.seconds_on_a_cpu(config.model, data.channels, data.size, data.num_classes)
    return config.epochs * len(data.train) * forward * (2 * config.objective.most_backprops + 3) / 86400


def _again(folder: Path, options: Options) -> str:
    """The command that continues a run on the same device and engine."""
    words = ["sparring", "train", "--out", str(folder), "--resume"]
    for name in ("device", "engine"):  # the folder does not keep these
        value = getattr(options, name)
        words += [f"--{name}", value] if value != "auto" else []
    return shlex.join([*words, *([] if options.tensorboard else ["--no-tensorboard"])])


def _options(argv: list[str]) -> tuple[str, Options]:
    """The recipe's name and the options, from the command line; without a recipe, those of the run to resume."""
    if argv and not argv[0].startswith("-"):
        recipe, rest = argv[0], argv[1:]
        base, prog = recipes.find(recipe).config, f"sparring train {recipe}"
    elif {"-h", "--help"} & set(argv):
        recipe, base, rest, prog = "", Config(), argv, "sparring train RECIPE"
    else:
        found = _to_resume(argv)
        recipe, base, rest, prog = found.recipe, found.config, argv, f"sparring train {found.recipe}".rstrip()
    kind = _objective(rest, base.objective)
    _refuse_what_is_ignored(rest, kind)
    rest = [re.sub(r"^--beta(?==|$)", "--attack.beta", word) for word in rest]  # the short form of the flag
    base = with_objective(base, kind.name)
    made = make_dataclass(
        "Options",
        [("attack", Annotated[kind, tyro.conf.arg(name="attack")])],
        bases=(Options,),
        frozen=True,
        kw_only=True,
    )
    given = parse(made, rest, prog=prog, description=DESCRIPTION, default=made(config=base, attack=base.objective))
    own = {field.name: getattr(given, field.name) for field in fields(Options)}
    options = Options(**own | {"config": replace(given.config, objective=given.attack)})
    if options.resume and options.overwrite:
        raise UserError("--resume continues a run and --overwrite replaces it. Give one of them.")
    return recipe, options


def _objective(argv: list[str], default: Objective) -> type[Any]:
    """The objective's class: --objective NAME, or the recipe's."""
    name = _value_of("--objective", argv)
    if name is not None and name not in OBJECTIVES:
        raise unknown("objective", name, OBJECTIVES)
    return type(default) if name is None else OBJECTIVES[name]


def _refuse_what_is_ignored(argv: list[str], kind: type[Any]) -> None:
    """Refuse a parameter of another objective, and name the objectives that have it."""
    readers: dict[str, list[str]] = {}
    for name, objective in OBJECTIVES.items():
        for field in fields(objective):
            readers.setdefault(field.name, []).append(name)
    own = {field.name for field in fields(kind)}
    for word in argv:
        flag = re.match(r"--(?:attack\.(?:no-)?([\w-]+)|(beta))(?==|$)", word)
        parameter = (flag[1] or flag[2]).replace("-", "_") if flag else ""
        if flag and parameter in readers and parameter not in own:
            if not own:
                raise UserError(f"{kind.name} makes no adversarial data and does not read {flag[0]}. Leave it out.")
            who = ", ".join(readers[parameter])
            raise UserError(f"{kind.name} does not read {flag[0]} (it belongs to {who}). Leave it out.")


def _to_resume(argv: list[str]) -> run_folder.RunFolder:
    """The run to resume, for a command line without a recipe."""
    out = _value_of("--out", argv)
    if "--resume" in argv and out is not None:
        return run_folder.open_run(Path(out))
    if "--resume" in argv:
        raise UserError("which run? Name its folder: sparring train --out runs/fat-digits-seed0 --resume.")
    later = next((word for word in argv if word in recipes.RECIPES), None)
    if later is not None:
        raise UserError(f"the recipe goes first, then the options: sparring train {later} ...")
    raise UserError("which recipe? Write for example: sparring train fat-digits. All: sparring recipes.")


def _value_of(flag: str, argv: list[str]) -> str | None:
    value = None  # the last one counts, as with all other options
    for word, following in itertools.pairwise([*argv, ""]):
        if word == flag and following:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def _summary(folder: Path) -> None:
    records = run_folder.whole_history(folder)
    best = max(records, key=lambda record: (record["pgd10"], record["natural"], -record["epoch"]))
    run = run_folder.open_run(folder)
    for name, record in (("best", best), ("last", records[-1])):
        file = folder / f"{name}.safetensors"
        print(
            f"{name}: epoch {record['epoch']}, on {run.config.validation} validation images natural "
            f"{record['natural']:.1%}, PGD-10 {record['pgd10']:.1%}  ({file}{'' if file.is_file() else ': missing'})"
        )
    eps = run.config.objective.radius
    radius = (
        [] if not eps or abs(eps - 8 / 255) < 1e-3 else ["--eps", schedules.spell(eps)]
    )  # the paper's protocols have 8/255
    words = ["sparring", "evaluate", str(folder), *_expected_by(run), *radius]
    print(f"Now measure it on test data: {shlex.join(words)}")


def _expected_by(run: run_folder.RunFolder) -> list[str]:
    """The protocol that the recipe's expected numbers were measured by, so that the numbers compare."""
    known = recipes.RECIPES.get(run.recipe)
    if known is None or known.config.data != run.config.data:
        return []
    protocol = PROTOCOLS.get(run.config.data)
    return ["--protocol", protocol] if protocol else []
