"""`sparring train`: trains a recipe with overrides into a run folder."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from sparring import recipes, schedules, weights
from sparring.cli.arguments import name_model, named_again, parse
from sparring.cli.console import let_go, silent_unless
from sparring.cli.progress import command_bar
from sparring.cli.recipes import PROTOCOLS
from sparring.cli.signals import stopped
from sparring.data import Dataset, load
from sparring.engine import EngineKind
from sparring.errors import RunFailed, UserError, unknown
from sparring.models.own import unnamed
from sparring.objectives import OBJECTIVES, Objective
from sparring.training import run_folder, torchrun
from sparring.training.advice import notes
from sparring.training.config import Config, flat_written, spelled, with_objective
from sparring.training.distributed import Backend, World, joined, pick_device
from sparring.training.loop import Interrupted, train
from sparring.training.resume import finished
from sparring.training.signals import stopping

DESCRIPTION = """Train a model by a recipe; any part of the recipe can be replaced.

Examples:
  sparring train fat-digits
  sparring train fat-cifar10-resnet18 --epochs 30 --attack.eps 8/255 --seed 3
  sparring train fat-cifar10-resnet18 --data folder:my-images --validation 100 --epochs 30
  sparring train fat-digits --model my_net:make
  sparring train fat-digits --init runs/fat-digits-seed0 --out runs/tuned
  sparring train --out runs/fat-digits-seed0 --resume
  sparring train --out runs/fat-digits-seed0 --resume --epochs 60

Recipes: sparring recipes"""
_LONGEST = 80  # letters of what differs from the recipe, in the name of a run folder


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run computes, and where and how it happens."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run folder; runs/RECIPE-seedN unless given, with what differs from the recipe: runs/RECIPE-tau3-epochs5-seedN."""
    resume: bool = False
    """Continue the run in the folder, if it holds one."""
    overwrite: bool = False
    """Replace a run that is already in the folder."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    engine: EngineKind = "auto"
    """auto takes captured graphs and bf16 where CUDA is; plain is the reference."""
    deterministic: bool = False
    """On CUDA, take only algorithms that give the same bits every time, none of them chosen by timing; slower."""
    backend: Backend = "auto"
    """How processes that torchrun has started exchange gradients: nccl on CUDA and gloo on CPUs, unless given."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    track: tyro.conf.UseAppendAction[tuple[tuple[Literal["csv", "tensorboard", "wandb", "trackio"], ...], ...]] = ()
    """Where else the metrics of every epoch go: csv (metrics.csv in the run folder), tensorboard, wandb, trackio."""

    @property
    def trackers(self) -> list[str]:
        """Their names: --track a b, --track a --track b."""
        return [name for names in self.track for name in names]


def run(argv: list[str]) -> int:
    """The command, in one process or in each of those that torchrun has started."""
    recipe, options = options_of(argv)
    name_model(_value_of("--model", argv))
    device = pick_device(options.device, options.backend)
    if note := torchrun.half_launched():
        print(f"note: {note}")
    with joined(device, options.backend) as world, silent_unless(world.first):
        _run(recipe, options, _given(argv), device, world)
    return 0


def _run(recipe: str, options: Options, given: set[str], device: torch.device, world: World) -> None:
    wanted, folder = options.config, options.out or _folder(recipe, options.config)
    ours = world.began(folder)  # a restart by torchrun continues what these processes began, and nothing else
    resume = options.resume or ours
    with world.together():
        data = _data(wanted, resume=resume)
        done = resume and finished(folder, wanted)
        if (error := unnamed(wanted.model)) is not None:
            raise error
    again = f"Continue with: {_again(folder, options, world)}"
    before = _written(folder)
    try:
        print(
            f"{wanted.objective.name} on {data.name} ({len(data.train)} training and {len(data.test)} test images, "
            f"{data.num_classes} classes) -> {folder}"
        )
        if done:
            print(f"already finished: {wanted.epochs} of {wanted.epochs} epochs.")
        else:
            for note in (*_of_ones_own(data, wanted.data), *notes(wanted, data, device)):
                print(f"note: {note}")
        with stopping() as stop:
            train(
                wanted,
                folder,
                recipe=recipe,
                resume=resume,
                overwrite=options.overwrite and not ours,
                device=device,
                initial=weights.initial,
                renewed=given,
                say=lambda line: print(f"note: {line}"),
                data=data,
                tracker=[*options.trackers, command_bar()],
                stop=stop,
                tensorboard=options.tensorboard,
                engine=options.engine,
                deterministic=options.deterministic,
                world=world,
            )
    except Interrupted as interrupted:
        raise _elsewhere(stopped(f"{interrupted}. {again}"), world) from None
    except KeyboardInterrupt:
        if not resume and _written(folder) == before:
            raise _elsewhere(stopped("interrupted before the run was started."), world) from None
        lost = "interrupted; the steps since the last checkpoint are lost."
        raise _elsewhere(stopped(f"{lost} {again}"), world) from None
    except BrokenPipeError:
        let_go()
        raise RunFailed(f"stopped, because the output pipe was closed. {again}") from None
    with world.together():
        if world.first:
            _summary(folder)


def _elsewhere(failure: RunFailed, world: World) -> RunFailed:
    """The failure of all processes, which the first one reports."""
    failure.elsewhere = None if not world.grouped else not world.first
    return failure


def _written(folder: Path) -> int:
    """When the run in a folder was started, 0 for none: two runs differ in it."""
    config = folder / run_folder.CONFIG
    return config.stat().st_mtime_ns if config.exists() else 0


def _data(wanted: Config, *, resume: bool) -> Dataset:
    try:
        return load(wanted.data)
    except UserError as error:
        if not resume or wanted.data.startswith("own:"):  # which says its own fix
            raise
        raise UserError(f"{error} If the images have moved, give their path: --data.") from None


def _of_ones_own(data: Dataset, spec: str) -> list[str]:
    """How the user's own images were read: split, scaled, left out."""
    return [f"{data.note}."] if spec.startswith(("folder:", "npz:")) else []


def _folder(recipe: str, wanted: Config) -> Path:
    """runs/RECIPE-seedN, with what differs from the recipe in it."""
    return Path("runs") / folder_name(recipe, wanted)


def folder_name(recipe: str, wanted: Config) -> str:
    """A run by its recipe, what differs from it, and its seed: fat-digits-tau3-epochs5-seed0."""
    known = recipes.RECIPES.get(recipe)
    changed = "" if known is None else "".join(f"-{word}" for word in _overrides(known.config, wanted))
    if len(changed) > _LONGEST:
        changed = f"{changed[: _LONGEST - 9]}-{hashlib.sha256(changed.encode()).hexdigest()[:8]}"
    return f"{recipe or 'run'}{changed}-seed{wanted.seed}"


def _overrides(base: Config, wanted: Config) -> Iterator[str]:
    """What a run changes in its recipe, in words fit for a file's name; the objective and its parameters come first."""
    if wanted.objective.name != base.objective.name:
        yield wanted.objective.name
    before, after = flat_written(with_objective(base, wanted.objective.name)), flat_written(wanted)
    for name in sorted(after, key=lambda name: not name.startswith("attack.")):
        value = after[name]
        if name in ("seed", "objective") or before.get(name) == value:
            continue
        word = name.removeprefix("attack.")
        if name == "data":
            yield Path(str(value).partition("?")[0].rpartition(":")[2]).stem
        elif isinstance(value, bool):
            yield word if value else f"no-{word}"
        else:
            said = spelled(value).replace("/", "_")
            yield re.sub(r"[^\w.,@%=+-]+", "-", f"{word}-{said}" if said[:1].isalpha() else word + said)


def _again(folder: Path, options: Options, world: World) -> str:
    """The command that continues a run on the same device and engine."""
    program = [*torchrun.again(), "-m", "sparring"] if world.grouped else ["sparring"]
    words = [*program, "train", "--out", str(folder), "--resume", *named_again(options.config.model)]
    for name in ("device", "engine", "backend"):  # the folder does not keep these
        value = getattr(options, name)
        words += [f"--{name}", value] if value != "auto" else []
    words += ["--deterministic"] if options.deterministic else []
    words += [] if options.tensorboard else ["--no-tensorboard"]
    return shlex.join([*words, *(["--track", *options.trackers] if options.trackers else [])])


def options_of(argv: list[str]) -> tuple[str, Options]:
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
    has_eps = any(re.match(r"--attack\.eps(=|$)", word) for word in rest)
    if given.attack.norm != base.objective.norm and not has_eps:
        raise UserError(
            f"the radius {base.objective.radius:.4g} of {recipe} is one in {base.objective.norm}. Give one for "
            f"{given.attack.norm}: --attack.eps {0.5 if given.attack.norm == 'l2' else '8/255'}."
        )
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


def _given(argv: list[str]) -> set[str]:
    """The names of the flags on a command line: lr, attack.tau."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}


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
    usual = run.config.objective.norm == "linf" and abs(eps - 8 / 255) < 1e-3  # the paper's protocols have 8/255
    radius = [] if not eps or usual else ["--eps", schedules.spell(eps)]
    words = ["sparring", "evaluate", str(folder), *named_again(run.config.model), *_expected_by(run), *radius]
    print(f"Now measure it on test data: {shlex.join(words)}")


def _expected_by(run: run_folder.RunFolder) -> list[str]:
    """The protocol that the recipe's expected numbers were measured by, so that the numbers compare."""
    known = recipes.RECIPES.get(run.recipe)
    if known is None or known.config.data != run.config.data:
        return []
    protocol = PROTOCOLS.get(run.config.data)
    return ["--protocol", protocol] if protocol else []
