"""Time of PGD-K-tau over the time of PGD-K on the same batch, on a CPU.

    python benchmarks/bench_attack.py

An example that takes b of K steps is computed b + 1 times, so a batch with a mean of b should cost about (b + 1) / K of
PGD-K. The bound is 1.15 times that. Prints one line per batch: mean BPs, the measured ratio (median of 5, with the
range), the bound, and whether it holds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sparring.attacks import friendly_pgd, pgd
from sparring.models import build

STEPS, BATCH, REPEATS = 10, 128, 5
SIZES = (0.08, 0.04, 0.025, 0.02)  # the larger the step, the sooner an untrained network is fooled


def batch(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Images with the labels that the model predicts; every ninth label is another one."""
    x = torch.rand(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    y[::9] = (y[::9] + 1) % 10
    return x, y


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> bool:
    torch.manual_seed(0)
    held = True
    model = build("small_cnn", num_classes=10, size=(16, 16)).eval()
    x, y = batch(model)
    for size in SIZES:
        setting = {"eps": 1.0, "step_size": size, "steps": STEPS}
        taken = friendly_pgd(model, x, y, tau=0, **setting).backprops
        ratios = []
        for _ in range(REPEATS):
            plain = seconds(lambda setting=setting: pgd(model, x, y, start=None, **setting))
            friendly = seconds(lambda setting=setting: friendly_pgd(model, x, y, tau=0, **setting))
            ratios.append(friendly / plain)
        mean = taken.double().mean().item()
        ratio, bound = statistics.median(ratios), 1.15 * (mean + 1) / STEPS
        held &= ratio <= bound
        print(
            f"{mean:5.2f} BPs of {STEPS}: {ratio:.2f} of PGD-{STEPS} ({min(ratios):.2f}-{max(ratios):.2f}), "
            f"bound {bound:.2f}: {'holds' if ratio <= bound else 'DOES NOT HOLD'}; "
            f"images by steps {torch.bincount(taken, minlength=STEPS + 1).tolist()}"
        )

    return held


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
