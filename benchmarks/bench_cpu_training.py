"""Time of an epoch of FAT on digits by the package over the time of a bare loop that does the same, on a CPU.

    python benchmarks/bench_cpu_training.py [OUT.json]

The bare loop is batch, friendly_pgd, backward, SGD. Both run in turn in one process, seven times. Compare the ratios,
not the seconds. The clock is the CPU time of the process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from sparring import recipes
from sparring.attacks import friendly_pgd
from sparring.data import batches, count_batches, hold_out, load
from sparring.objectives import Progress
from sparring.seeds import generator
from sparring.training import loop, run_folder, start
from sparring.training.config import model_facts

CPU, TURNS = torch.device("cpu"), 7


def main() -> None:
    torch.set_num_threads(1)
    config = recipes.find("fat-digits").config
    fat = config.objective
    data = load("digits")
    training, _ = hold_out(data.train, config.validation, seed=0)
    steps = count_batches(len(training), config.batch_size)

    def ours() -> float:
        state = start.begin(config, model_facts(config, data), CPU)
        engine = start.engine_for(config, state, data, CPU, "auto")
        began = time.process_time()
        loop.one_epoch(state, config, engine, training, steps, [], lambda: None, None, lambda: False)
        return time.process_time() - began

    def bare() -> float:
        state = start.begin(config, model_facts(config, data), CPU)
        model, optimizer = state.model.train(), state.optimizer
        began = time.process_time()
        for step, (x, y) in enumerate(batches(training, config.batch_size, seed=0, epoch=1)):
            progress = Progress(1 + step / steps, config.epochs)
            settings = fat.pgd(progress) | {"tau": int(progress.value(fat.tau))}
            optimizer.param_groups[0]["lr"] = progress.value(config.lr)
            found = friendly_pgd(model, x, y, generator=generator(CPU, 0, 1, step), **settings)
            optimizer.zero_grad()
            F.cross_entropy(model(found.x_adv), y).backward()
            optimizer.step()
        return time.process_time() - began

    ours(), bare()
    pairs = [(ours(), bare()) for _ in range(TURNS)]
    ratios = [one / other for one, other in pairs]
    found = {
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "n": TURNS,
        **run_folder.environment(CPU),
        "command": "python benchmarks/bench_cpu_training.py",
    }
    print(f"the package takes {found['median_ratio']:.3f} of the bare loop's time", end=" ")
    print(f"({min(ratios):.3f}-{max(ratios):.3f}, n={TURNS}, one CPU thread)")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
