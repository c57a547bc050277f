"""Check of the captured update on one GPU: every optimiser against the plain engine, five steps, fp32 and bf16.

    PYTHONPATH=src python3 benchmarks/check_optimisers.py [OUT.json]

For each case it prints the engine's line, the largest relative difference of a weight's movement from the plain
engine's, that of the losses, and steps per second. A case that fails is printed, and the next one runs; none is begun
after 150 seconds. On a CPU it checks its own logic at a small size.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sparring.attacks.losses import soft_targets
from sparring.engine import Engine, prepare
from sparring.models import build
from sparring.objectives import FAT
from sparring.training.optimisers import named

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, STEPS, TIMED = (128, 5, 50) if DEVICE.type == "cuda" else (8, 5, 2)
SHAPE = (3, 32, 32) if DEVICE.type == "cuda" else (3, 8, 8)
CLASSES, LR, BUDGET = 10, 0.01, 150.0
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """One way to update the weights."""

    optimizer: MakeOptimizer
    lr: float = LR
    clip: float = 0.0
    smoothing: float = 0.0
    awp: float = 0.0
    ema: float = 0.0


def by_name(name: str, **changes: object) -> MakeOptimizer:
    """One of the package's, with its usual numbers."""
    given = {"lr": LR, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": False, "no_decay": False}
    return lambda model: named(name, model, **given | changes)


CASES = {
    "sgd": Case(by_name("sgd")),
    "nesterov": Case(by_name("sgd", nesterov=True)),
    "adamw": Case(by_name("adamw", weight_decay=0.05), lr=1e-3),
    "adamw, no decay of vectors": Case(by_name("adamw", weight_decay=0.05, no_decay=True), lr=1e-3, clip=1.0),
    "clip": Case(by_name("sgd"), clip=0.1),
    "no decay of vectors": Case(by_name("sgd", no_decay=True)),
    "label smoothing": Case(by_name("sgd"), smoothing=0.1),
    "awp and ema": Case(by_name("sgd", nesterov=True), awp=0.005, ema=0.99),
    "own: RMSprop": Case(lambda model: torch.optim.RMSprop(model.parameters(), lr=LR), lr=1e-4),
}


def layer_norm_net() -> nn.Module:
    """Patches, two LayerNorm blocks with GELU, a head."""
    width, tokens = 64, (SHAPE[1] // 4) * (SHAPE[2] // 4)
    blocks = [
        layer
        for _ in range(2)
        for layer in (nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    ]
    stem = (nn.Conv2d(3, width, 4, stride=4), nn.Flatten(2), Transposed())
    return nn.Sequential(*stem, *blocks, nn.Flatten(), nn.Linear(width * tokens, CLASSES))


class Transposed(nn.Module):
    """(B, C, N) to (B, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """The last two dimensions, exchanged."""
        return x.transpose(1, 2)


def network(name: str) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    if name == "layer-norm":
        return layer_norm_net().to(DEVICE)
    return build(name, num_classes=CLASSES, channels=3, size=SHAPE[1:]).to(DEVICE)


def batch(step: int, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Images, moved images and targets of a step."""
    draw = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, *SHAPE, generator=draw)
    x_adv = (x + 0.03 * torch.randn(x.shape, generator=draw).sign()).clamp(0, 1)
    y = torch.randint(0, CLASSES, (BATCH,), generator=draw)
    target = soft_targets(y, CLASSES, smoothing=smoothing) if smoothing else y
    return x.to(DEVICE), x_adv.to(DEVICE), target.to(DEVICE)


def engine_of(case: Case, model: nn.Module, kind: str, half: bool) -> Engine:
    """The engine that updates the model."""
    how = {"batch": BATCH, "shape": SHAPE, "classes": CLASSES, "device": DEVICE, "half": half, "kind": kind}
    soft = case.smoothing > 0
    model.train()
    return prepare(model, case.optimizer(model), FAT().loss, ema=case.ema, soft=soft, clip=case.clip, **how)


def run(case: Case, model: nn.Module, engine: Engine) -> list[float]:
    """The losses of five updates."""
    losses = []
    for step in range(STEPS):
        x, x_adv, target = batch(step, case.smoothing)
        losses.append(engine.update(x, x_adv, target, case.lr * (step + 1) / STEPS, case.awp).item())
    assert not engine.failed(), "a step was not finite"
    return losses


def rate(case: Case, engine: Engine) -> float:
    """Steps per second."""
    given = batch(0, case.smoothing)
    for _ in range(3):
        engine.update(*given, 0.0, case.awp)
    wait()
    began = time.perf_counter()
    for _ in range(TIMED):
        engine.update(*given, 0.0, case.awp)
    wait()
    return TIMED / (time.perf_counter() - began)


def wait() -> None:
    """Let the GPU finish."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compare(case: Case, name: str, half: bool) -> dict[str, object]:
    """One case on one network: the fast engine beside the plain one."""
    plain, fast = network(name), network(name)
    start = copy.deepcopy([parameter.detach() for parameter in plain.parameters()])
    engines = [engine_of(case, plain, "plain", False), engine_of(case, fast, "fast", half)]
    losses = [run(case, model, engine) for model, engine in zip((plain, fast), engines, strict=True)]
    moves = [[(p.detach() - s).flatten() for p, s in zip(m.parameters(), start, strict=True)] for m in (plain, fast)]
    one, other = (torch.cat(each) for each in moves)
    return {
        "line": engines[1].line,
        "moved": ((one - other).norm() / one.norm()).item(),
        "loss": max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)),
        "steps_per_second": [rate(case, engine) for engine in engines],
    }


def main(argv: list[str]) -> int:
    """Every case; 1 where one has failed."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found: dict[str, object] = {}
    began, failed = time.perf_counter(), 0
    large = "resnet18" if DEVICE.type == "cuda" else "tiny_cnn"
    kinds = [(large, False), ("layer-norm", True), (large, True), ("layer-norm", False)]
    for (name, half), (title, case) in itertools.product(kinds, CASES.items()):
        key = f"{name}, {'bf16' if half else 'fp32'}, {title}"
        if time.perf_counter() - began > BUDGET:
            print(f"{key}: not run, out of time")
            continue
        try:
            row = compare(case, name, half)
        except Exception as error:  # a case that fails must not hide the others
            failed += 1
            found[key] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{key}: FAILED {found[key]}", flush=True)
            continue
        found[key] = row
        plain, fast = row["steps_per_second"]  # type: ignore[misc]
        print(f"{key}: moved {row['moved']:.2e}, loss {row['loss']:.2e}, {plain:.0f} -> {fast:.0f} steps/s")
        print(f"    {row['line']}", flush=True)
    print(f"{len(found) - failed} of {len(found)} cases, {time.perf_counter() - began:.0f} s on {DEVICE}")
    if argv:
        Path(argv[0]).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
