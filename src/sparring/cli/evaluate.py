"""`sparring evaluate`: run protocols on a model; a table on the screen, JSON and verdicts in a folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.markdown import Markdown
from rich.table import Table

from sparring import schedules
from sparring.attacks.threat import Norm
from sparring.cli.arguments import parse
from sparring.cli.console import Screen, silent_unless
from sparring.cli.result_folder import data_word, open_results
from sparring.cli.signals import stopped
from sparring.cli.subject import note_classes, of_a_run, open_subject
from sparring.errors import UserError
from sparring.evaluation import PROTOCOLS, Result, evaluate
from sparring.evaluation.gradient_model import GradientPrecision
from sparring.evaluation.protocols import find
from sparring.evaluation.sanity.checks import WHY
from sparring.evaluation.sanity.explain import page
from sparring.training import run_folder, torchrun
from sparring.training.checkpoint import write_text
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
    precision: GradientPrecision = "fp32"
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
    """Print the page on a doubt and exit; `--explain list` lists the doubts. Needs no PATH, and ignores one."""


@dataclass(frozen=True)
class Explain(Options):
    """The same where there is `--explain`, which needs no model: all other options are checked and ignored."""

    path: Annotated[Path, tyro.conf.Positional] = Path()
    explain: str = ""


def run(argv: list[str]) -> int:
    """Run the command."""
    if any(word.partition("=")[0] == "--explain" for word in argv) and not {"-h", "--help"} & set(argv):
        words = [*argv, "list"] if argv[-1] == "--explain" else argv
        return _explain(parse(Explain, words, prog="sparring evaluate", description=DESCRIPTION).explain)
    asked = parse(Options, argv, prog="sparring evaluate", description=DESCRIPTION)
    device = pick_device(asked.device, asked.backend)
    if note := torchrun.half_launched():
        print(f"note: {note}")
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
    asked = replace(asked, precision=_used(result))
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
    measured_in = asked.norm or "linf"
    if norm != measured_in:
        print(f"note: trained in {norm}, measured in {measured_in}.")
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


def _used(result: Result) -> GradientPrecision:
    """The precision that gradients really had, which is never bf16 for a float64 model."""
    return "bf16" if "bf16" in {record.precision for record in result} else "fp32"


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
