"""Does stopping early save time? PGD-K-tau against PGD-K on the same batch, in one run.

    python benchmarks/bench_attack.py

An example that takes b of K steps is computed b + 1 times, so a batch of mean b should cost about (b + 1) / K of PGD-K;
the bound is 1.15 times that. Prints one line per batch: mean BPs, the measured ratio (median of 5, with the range), the
bound, and whether it holds. Batches are put together from a pool, by the steps its images need.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sparring.attacks import friendly_pgd, pgd
from sparring.models import build

STEPS, BATCH, REPEATS = 10, 128, 5
SETTING = {"eps": 8 / 255, "step_size": 0.0015, "steps": STEPS}


def pool(model: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Images with the label the model gives them, or now and then another, and the steps that tau = 0 takes on each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 3, 16, 16, generator=generator)
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    y[::9] = (y[::9] + 1) % 10
    return x, y, friendly_pgd(model, x, y, tau=0, **SETTING).backprops


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    torch.manual_seed(0)
    model = build("small_cnn", num_classes=10, size=(16, 16)).eval()
    x, y, needed = pool(model)
    print(f"pool: images by steps needed {torch.bincount(needed, minlength=STEPS + 1).tolist()}")
    order = needed.argsort(stable=True)
    for name, share in [("easily fooled", 0.0), ("mixed", 0.35), ("half", 0.5), ("hard", 0.8)]:
        first = int(share * (len(order) - BATCH))
        last = len(order) - 1 if name == "mixed" else first + BATCH - 1
        picked = order[torch.linspace(first, last, BATCH).long()]
        batch = x[picked], y[picked]
        mean = friendly_pgd(model, *batch, tau=0, **SETTING).backprops.double().mean().item()
        ratios = []
        for _ in range(REPEATS):
            plain = seconds(lambda batch=batch: pgd(model, *batch, start=None, **SETTING))
            friendly = seconds(lambda batch=batch: friendly_pgd(model, *batch, tau=0, **SETTING))
            ratios.append(friendly / plain)
        ratio, bound = statistics.median(ratios), 1.15 * (mean + 1) / STEPS
        held = "holds" if ratio <= bound else "DOES NOT HOLD"
        print(
            f"{name:14} {mean:5.2f} BPs of {STEPS}: {ratio:.2f} of PGD-{STEPS} "
            f"({min(ratios):.2f}-{max(ratios):.2f}), bound {bound:.2f}: {held}"
        )


if __name__ == "__main__":
    main()
