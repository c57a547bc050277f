"""`sparring bound`: Theorem 1 of the paper on a model and its data, as a table on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sparring import schedules
from sparring.cli.arguments import parse
from sparring.cli.console import Screen
from sparring.cli.result_folder import data_word, open_results
from sparring.cli.subject import note_classes, of_a_run, open_subject
from sparring.errors import UserError
from sparring.paper.bound import SURROGATE, Bound, Estimate, estimate
from sparring.paper.extremes import Strongest
from sparring.training import run_folder
from sparring.training.checkpoint import write_text
from sparring.training.distributed import pick_device

DESCRIPTION = f"""Theorem 1 of the paper, checked: adversarial risk <= friendly bound <= conventional bound?

The friendly bound adds to the natural loss the least loss of a misclassified point in the ball (plus rho), or the
largest loss if no point is misclassified. The conventional bound always adds the largest loss. Intervals are 95 %
bootstrap intervals.
Surrogate: {SURROGATE}.

Examples:
  sparring bound runs/fat-digits-seed0
  sparring bound runs/x --limit 1000 --eps 8/255 --rho 0.5
  sparring bound model.pth.tar --data cifar10 --eps 8/255 --strongest pgd"""


_FEWEST = 10  # images: a bootstrap interval of fewer means nothing


@dataclass(frozen=True)
class Options:
    """What to check, how, and where to write the result."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run folder, a .safetensors file, or a published .pt, .pth or .pth.tar."""
    data: str | None = None
    """Test images: digits, cifar10, svhn, npz:FILE or folder:PATH. By default the data that the run was trained on."""
    limit: int | None = None
    """Use only the first N images."""
    eps: float | None = None
    """Radius of the ball, in [0, 1] pixels (8/255). By default the radius that the run was trained for."""
    rho: float = 0.1
    """The theorem's small constant, in bits."""
    strongest: Strongest = "autoattack"
    """The strongest attack on the risk: autoattack, or pgd for a quick estimate."""
    seed: int = 0
    """Seed of the random starts and of the bootstrap."""
    resamples: int = 1000
    """Number of bootstrap resamples."""
    batch_size: int | None = None
    """Largest number of images at once; by default as many as fit."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    which: Literal["last", "best"] = "last"
    """The checkpoint of a run folder."""
    model: str | None = None
    """Architecture, if it cannot be found from the file."""
    mean: tuple[float, ...] = ()
    """Channel means that the model was trained with, if the file has no normalisation layer."""
    std: tuple[float, ...] = ()
    """Channel standard deviations, likewise."""
    out: Path | None = None
    """Folder for the result; by default RUN/evaluation, or evaluation/NAME for a file."""
    json: Path | None = None
    """Also write the JSON here."""


def run(argv: list[str]) -> int:
    """The command."""
    asked = parse(Options, argv, prog="sparring bound", description=DESCRIPTION)
    path, which = of_a_run(asked.path, asked.which)
    asked = replace(asked, path=path, which=which)
    loaded, spec, images = open_subject(
        path,
        which=which,
        data_name=asked.data,
        device=pick_device(asked.device),
        model=asked.model,
        mean=asked.mean,
        std=asked.std,
    )
    n = min(len(images.test), asked.limit or len(images.test))
    if 0 < n < _FEWEST:
        raise UserError(f"{n} test images: an interval needs at least {_FEWEST}. Use more images.")
    asked = replace(asked, limit=None if asked.limit is not None and asked.limit >= len(images.test) else asked.limit)
    note_classes(images.test.y, n)
    eps = _radius(path, loaded.facts) if asked.eps is None else asked.eps
    folder = open_results(path, out=asked.out, json=asked.json, file=f"{_name(asked)}.json")
    with _bar() as bar:
        task = bar.add_task("images", total=n)
        found = estimate(
            loaded.model,
            images.test.x,
            images.test.y,
            eps=eps,
            rho=asked.rho,
            strongest=asked.strongest,
            limit=asked.limit,
            seed=asked.seed,
            resamples=asked.resamples,
            batch_size=asked.batch_size,
            progress=lambda what, done, n: bar.update(task, description=what, completed=done, total=n),
        )
    screen = Screen()
    screen.print(_table(found))
    screen.print(f"Loss: {SURROGATE}.", highlight=False)
    for inequality, finding in found.findings().items():
        always = " (always true for points that were found)" if inequality.startswith("risk") else ""
        screen.print(f"{inequality}: {finding}{always}", highlight=False)
    for name, bound in (("friendly", found.friendly), ("conventional", found.conventional)):
        if bound.value >= 1:
            screen.print(f"The {name} bound is at least 1, so it does not constrain the risk.", highlight=False)
    if found.largest_rho is not None:
        screen.print(
            f"The second inequality holds for rho up to {found.largest_rho:.4f} on these images.", highlight=False
        )
    device = next((p.device for p in loaded.model.parameters()), torch.device("cpu"))
    about = {"model": str(asked.path), "which": which, "data": spec, "data_note": images.note, "facts": loaded.facts}
    facts = {**found.as_dict(), "about": about, "software": run_folder.environment(device)}
    text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
    for file in [folder / f"{_name(asked)}.json", *([asked.json] if asked.json else [])]:
        write_text(file, text)
        print(f"wrote {file}")
    return 0


def _name(asked: Options) -> str:
    """The file name of a result: every setting that differs from its default."""
    parts = ["bound", *([data_word(asked.data)] if asked.data is not None else [])]
    for name in ("eps", "rho", "limit", "seed", "resamples", "strongest", "which"):
        value = getattr(asked, name)
        if value != Options.__dataclass_fields__[name].default:
            parts.append(value if isinstance(value, str) else f"{name}{schedules.spell(value)}")
    return "-".join(parts)


def _radius(path: Path, facts: Mapping[str, Any]) -> float:
    """The largest radius that a model was trained with: of its run, or as an exported model records it."""
    threat = facts.get("threat") or {}
    eps, norm = threat.get("eps"), threat.get("norm", "linf")
    if eps is None:
        if not (path / run_folder.CONFIG).is_file():
            raise UserError(f"{path} does not record the radius it was trained for. Give it: --eps 8/255.")
        try:
            objective = run_folder.open_run(path).config.objective
        except UserError:
            raise UserError(f"{path / run_folder.CONFIG} cannot be read. Give the radius: --eps 8/255.") from None
        eps, norm = objective.radius, objective.norm
    if norm != "linf":
        raise UserError(
            f"{path} was trained in {norm}, and the bound is measured in linf only. To measure it there all the same, "
            "give a radius: --eps 8/255."
        )
    return float(eps)


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


def _table(found: Bound) -> Table:
    title = f"Theorem 1 on {found.n} images, eps {found.eps:.6g}, rho {found.rho:g}; losses in bits"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "estimate", "95 % interval"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)

    def row(name: str, value: Estimate) -> None:
        table.add_row(name, f"{value.value:.4f}", f"{value.low:.4f} to {value.high:.4f}")

    row("natural term", found.natural)
    row("robust term, friendly loss", found.friendly_term)
    row("robust term, worst-case loss", found.worst_term)
    table.add_section()
    attack = "AutoAttack" if found.strongest == "autoattack" else "PGD"
    row(f"adversarial risk ({attack})", found.risk)
    row("friendly bound", found.friendly)
    row("conventional bound", found.conventional)
    table.add_section()
    row("friendly bound - risk", found.above_risk)
    row("conventional - friendly bound", found.tighter)
    return table
