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
from sparring.bench import (
    AblationOptions,
    Benchmark,
    BenchmarkOptions,
    ablation,
    measure_scaling,
    scaling_in_words,
    start_in_words,
)
from sparring.bench.start_up import START_UP
from sparring.bench.training import fat_of
from sparring.cli.arguments import name_model, parse
from sparring.cli.console import Screen, silent_unless
from sparring.data import load
from sparring.engine import on
from sparring.errors import RunFailed, UserError, unknown
from sparring.files.json_text import read_json
from sparring.files.leftovers import sweep
from sparring.files.schema import anything, fields, table
from sparring.training import run_folder, torchrun
from sparring.training.checkpoint import write_text
from sparring.training.config import Config, Precision
from sparring.training.distributed import Backend, World, joined, pick_device

DESCRIPTION = """How fast training is here: attack steps, updates, real epochs, and the plain paths in the same run.

Examples:
  sparring bench                                    # digits on a CPU; CIFAR-10 with ResNet-18 on a GPU
  sparring bench fat-cifar10-resnet18 --only steps epochs
  sparring bench --only parts                       # what each hand-written part of the engine buys (GPU)
  sparring bench --model wrn-34-10 --precision fp8 --only parts --parts-of fp8   # eight bits beside bf16
  torchrun --nproc-per-node 8 -m sparring bench --only scaling   # what several processes gain
  sparring bench --cold-start                       # start-up with an empty and a full compile cache

FAT's epochs are compared with Madry's and, where the engine runs (CUDA), with the sum of their own steps. Close other
programs first."""
MEASURED = ("start-up", "correct", "steps", "epochs", "plain", "together", "memory")
ABLATION, SCALING = "parts", "scaling"  # only where they are named
NETWORKS = ("small_cnn", "resnet18", "wrn-34-10")  # of the ablation on a GPU


@dataclass(frozen=True)
class Options:
    """What is measured, and where the results go."""

    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe of a friendly objective: fat-digits, or fat-cifar10-resnet18 where there is a GPU."""
    only: tuple[str, ...] = ()
    """Some of start-up correct steps epochs plain together memory; or parts; or scaling."""
    model: str | None = None
    """Another architecture than the recipe's, such as wrn-34-10."""
    batch_size: int | None = None
    """Another batch size than the recipe's."""
    precision: Precision | None = None
    """Another precision than the recipe's: fp32, bf16 or fp8."""
    what: Annotated[BenchmarkOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=BenchmarkOptions)
    parts: Annotated[AblationOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=AblationOptions)
    without: tuple[str, ...] = ()
    """Hand-written parts of the engine to leave out of everything that is measured."""
    cold_start: bool = False
    """Also measure the start with an empty and with a full compile cache, in processes of their own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    backend: Backend = "auto"
    """Of processes that torchrun has started: nccl on CUDA and gloo on CPUs, unless given."""
    json: Path = Path("bench.json")
    """Where the numbers go, after every part."""


def run(argv: list[str]) -> int:
    """The command."""
    asked = parse(Options, argv, prog="sparring bench", description=DESCRIPTION)
    for name in asked.only:
        if name not in (*MEASURED, ABLATION, SCALING):
            raise unknown("part", name, (*MEASURED, ABLATION, SCALING))
    if torchrun.size() > 1 and set(asked.only) != {SCALING}:
        raise UserError("of sparring bench, torchrun is for --only scaling alone.")
    name_model(asked.model)
    device = pick_device(asked.device, asked.backend)
    recipe = recipes.find(asked.recipe or ("fat-cifar10-resnet18" if device.type == "cuda" else "fat-digits"))
    config = replace(
        recipe.config,
        model=asked.model or recipe.config.model,
        batch_size=recipe.config.batch_size if asked.batch_size is None else asked.batch_size,
        precision=asked.precision or recipe.config.precision,
    )
    fat_of(config)
    parent = asked.json.parent
    written = asked.json if asked.json.exists() else parent
    if asked.json.is_dir() or not parent.is_dir() or not os.access(written, os.W_OK):
        raise UserError(f"--json {asked.json} cannot be written. Name a file in a folder that exists.")
    sweep(parent, asked.json.name.__eq__)
    with on(device), joined(device, asked.backend) as world, silent_unless(world.first):
        if not asked.only or set(asked.only) - {ABLATION, SCALING}:
            _measure(recipe.name, config, device, asked)
        if SCALING in asked.only:
            _scale(recipe.name, config, device, asked, world)
        if ABLATION in asked.only:
            _ablate(recipe.name, config, device, asked)
        print(f"wrote {asked.json}")
    return 0


def _measure(recipe: str, config: Config, device: torch.device, asked: Options) -> None:
    """Show and write every part as it is measured."""
    bench = Benchmark(config, load(config.data), device, asked.what, without=asked.without)
    screen = Screen()
    screen.print(f"{recipe}, {config.model}, batch {config.batch_size}, {bench.found['device']}")
    for name, rows in bench.parts(asked.only):
        screen.print(name, style="bold", highlight=False)
        for what, value in rows:
            screen.print(f"  {what:28} {value}", highlight=False, soft_wrap=True)
        write_text(asked.json, json.dumps(bench.found, indent=1))
    if asked.cold_start:
        bench.found["cold_start"] = _starts(recipe, config, asked.device, asked.without)
        for which, start in bench.found["cold_start"].items():
            screen.print(
                f"  {which + ' cache':28} first step after {start_in_words(start)}", highlight=False, soft_wrap=True
            )
        write_text(asked.json, json.dumps(bench.found, indent=1))


def _scale(recipe: str, config: Config, device: torch.device, asked: Options, world: World) -> None:
    """Show and write what these processes gain, and what more of them would."""
    how: dict[str, Any] = {"kind": asked.what.engine, "repeats": asked.what.repeats}
    scaling = measure_scaling(config, load(config.data), device, world, **how)
    screen = Screen()
    screen.print(f"{recipe}, {config.model}, batch {config.batch_size} per process", style="bold", highlight=False)
    for what, value in scaling_in_words(scaling):
        screen.print(f"  {what:24} {value}", highlight=False, soft_wrap=True)
    if world.first:
        found = {"recipe": recipe, "model": config.model, **run_folder.environment(device), SCALING: scaling}
        write_text(asked.json, json.dumps(found, indent=1))


def _ablate(recipe: str, config: Config, device: torch.device, asked: Options) -> None:
    """Show and write what each hand-written part buys, network by network."""
    data = load(config.data)
    found: dict[str, Any] = {"recipe": recipe, **run_folder.environment(device), "networks": {}}
    if asked.json.exists() and set(asked.only) != {ABLATION}:
        found = read_json(asked.json, table(anything)) | {"networks": {}}
    screen = Screen()
    default = NETWORKS if device.type == "cuda" and asked.model is None else (config.model,)
    for model in asked.parts.models or default:
        screen.print(f"{recipe}, {model}, batch {config.batch_size}", style="bold", highlight=False)

        def keep(row: dict[str, Any], model: str = model) -> None:
            found["networks"][model] = row
            write_text(asked.json, json.dumps(found, indent=1))

        rows = ablation(
            replace(config, model=model),
            data,
            device,
            asked.parts,
            images=asked.what.images,
            kind=asked.what.engine,
            keep=keep,
        )
        for what, value in rows:
            screen.print(f"  {what:24} {value}", highlight=False, soft_wrap=True)


def _starts(recipe: str, config: Config, device: str, without: tuple[str, ...]) -> dict[str, Any]:
    """Start-up in two fresh processes that share a compile cache: empty for the first, full for the second."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        out = Path(folder) / "start.json"
        command = [sys.executable, "-m", "sparring", "bench", recipe, "--device", device]
        command += ["--model", config.model, "--batch-size", str(config.batch_size)]
        command += ["--without", *without] if without else []
        for which in ("empty", "full"):
            done = subprocess.run(
                [*command, "--only", "start-up", "--json", str(out)], env=os.environ | caches, capture_output=True
            )
            if done.returncode:
                raise RunFailed(f"a fresh process could not start: {done.stderr.decode()[-300:]}")
            found[which] = read_json(out, fields(start_up=START_UP, others=anything))["start_up"]
    return found
