"""`sparring bench`: one recipe's speed on this machine; a table on the screen, JSON in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from sparring import recipes
from sparring.bench import Benchmark, Options, told_start
from sparring.cli.arguments import parse
from sparring.cli.console import Screen
from sparring.cli.train import pick_device
from sparring.data import load
from sparring.engine import on
from sparring.errors import RunFailed, UserError, unknown
from sparring.training.checkpoint import write_text
from sparring.training.config import Config

DESCRIPTION = """How fast training is here: attack steps, updates, real epochs, and the plain ways in the same run.

Examples:
  sparring bench                                    # digits on a CPU; CIFAR-10 with ResNet-18 on a GPU
  sparring bench fat-cifar10-resnet18 --only steps epochs
  sparring bench --cold-start                       # start-up with an empty and a full compile cache

FAT's epochs are compared with Madry's and, where the engine runs (CUDA), with the sum of their own steps. Close other
programs first."""
PARTS = ("start-up", "correct", "steps", "epochs", "plain", "together", "memory")


@dataclass(frozen=True)
class Arguments:
    """What is measured, and where the results go."""

    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe of a friendly objective: fat-digits, or fat-cifar10-resnet18 where there is a GPU."""
    only: tuple[str, ...] = ()
    """Some of the parts: start-up correct steps epochs plain together memory."""
    model: str | None = None
    """Another architecture than the recipe's, such as wrn-34-10."""
    batch_size: int | None = None
    """Another batch size than the recipe's."""
    what: Annotated[Options, tyro.conf.OmitArgPrefixes] = field(default_factory=Options)
    cold_start: bool = False
    """Also measure the start with an empty and with a full compile cache, in processes of their own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Path = Path("bench.json")
    """Where the numbers go, after every part."""


def run(argv: list[str]) -> int:
    """The command."""
    asked = parse(Arguments, argv, prog="sparring bench", description=DESCRIPTION)
    for name in asked.only:
        if name not in PARTS:
            raise unknown("part", name, PARTS)
    device = pick_device(asked.device)
    recipe = recipes.find(asked.recipe or ("fat-cifar10-resnet18" if device.type == "cuda" else "fat-digits"))
    config = replace(
        recipe.config,
        model=asked.model or recipe.config.model,
        batch_size=recipe.config.batch_size if asked.batch_size is None else asked.batch_size,
    )
    if config.objective.name != "fat":
        raise UserError(f"bench times FAT against Madry; {recipe.name} is {config.objective.name}. Write fat-digits.")
    if asked.json.is_dir() or not asked.json.parent.is_dir():
        raise UserError(f"--json {asked.json} cannot be written. Name a file in a folder that exists.")
    with on(device):
        _measure(recipe.name, config, device, asked)
    print(f"wrote {asked.json}")
    return 0


def _measure(recipe: str, config: Config, device: torch.device, asked: Arguments) -> None:
    """Every part, shown and written as it is measured."""
    bench = Benchmark(config, load(config.data), device, asked.what)
    screen = Screen()
    screen.print(f"{recipe}, {config.model}, batch {config.batch_size}, {bench.found['device']}")
    for name, rows in bench.parts(asked.only):
        screen.print(name, style="bold", highlight=False)
        for what, value in rows:
            screen.print(f"  {what:28} {value}", highlight=False, soft_wrap=True)
        write_text(asked.json, json.dumps(bench.found, indent=1))
    if asked.cold_start:
        bench.found["cold_start"] = _starts(recipe, config, asked.device)
        for which, start in bench.found["cold_start"].items():
            screen.print(
                f"  {which + ' cache':28} first step after {told_start(start)}", highlight=False, soft_wrap=True
            )
        write_text(asked.json, json.dumps(bench.found, indent=1))


def _starts(recipe: str, config: Config, device: str) -> dict[str, Any]:
    """Start-up in two fresh processes that share a compile cache: empty for the first, full for the next."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        out = Path(folder) / "start.json"
        command = [sys.executable, "-m", "sparring", "bench", recipe, "--device", device]
        command += ["--model", config.model, "--batch-size", str(config.batch_size)]
        for which in ("empty", "full"):
            done = subprocess.run(
                [*command, "--only", "start-up", "--json", str(out)], env=os.environ | caches, capture_output=True
            )
            if done.returncode:
                raise RunFailed(f"a fresh process could not start: {done.stderr.decode()[-300:]}")
            found[which] = json.loads(out.read_text())["start_up"]
    return found
