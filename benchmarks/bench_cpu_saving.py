"""Time of training FAT on digits over that of Madry on a CPU: as the demo trains them, and by the digits recipes.

    python benchmarks/bench_cpu_saving.py [--threads 2] [--recipes] [--out OUT.json]

All train in turn, epoch by epoch, in one process with the settings of the command. With one thread the clock is the
CPU time of the process; with more it is the wall clock, and the machine must be idle. Prints seconds in the attack, the
update and altogether, and FAT's over Madry's.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from sparring.cli import cpu_early

cpu_early.start()

import torch  # noqa: E402

from sparring.cli import demo  # noqa: E402
from sparring.data import count_batches, hold_out, load  # noqa: E402
from sparring.engine import Engine  # noqa: E402
from sparring.objectives import FAT  # noqa: E402
from sparring.recipes import digits  # noqa: E402
from sparring.training import loop, run_folder, start  # noqa: E402
from sparring.training.config import Config, model_facts  # noqa: E402
from sparring.training.state import Tally  # noqa: E402

CPU = torch.device("cpu")


class Timed:
    """One training, its attack and its update timed."""

    def __init__(self, config: Config, clock) -> None:
        self.config, self.clock, self.data = config, clock, load("digits")
        self.state = start.begin(config, model_facts(config, self.data), CPU)
        self.engine: Engine = start.engine_for(config, self.state, self.data, CPU, "auto")
        self.training, _ = hold_out(self.data.train, config.validation, seed=0)
        self.steps = count_batches(len(self.training), config.batch_size)
        self.seconds = {"attack": 0.0, "update": 0.0, "all": 0.0}
        self.backprops = 0.0
        for name in ("attack", "update"):
            setattr(self.engine, name, self.timed(name, getattr(self.engine, name)))

    def timed(self, name, work):
        def run(*given):
            began = self.clock()
            found = work(*given)
            self.seconds[name] += self.clock() - began
            return found

        return run

    def epoch(self, number: int) -> None:
        self.state.epoch, self.state.step, self.state.tally = number, 0, Tally.empty(CPU)
        given = (self.state, self.config, self.engine, self.training, self.steps, [])
        began = self.clock()
        loop.one_epoch(*given, lambda: None, None, lambda: False)
        self.seconds["all"] += self.clock() - began
        self.backprops += self.state.tally.backprops.item() / self.state.tally.images / self.config.epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recipes", action="store_true", help="batches of 64 and 15 epochs, tau 1 and 2")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.process_time if asked.threads == 1 else time.perf_counter
    madry, taus = (digits.MADRY, (1, 2)) if asked.recipes else (demo.TRIALS["Madry"][0], (demo.FRIENDLY.tau, 1, 2))
    methods = {"Madry": madry}
    for tau in taus:
        methods[f"FAT, tau {tau}"] = replace(madry, objective=FAT(**digits.ATTACK, tau=tau))
    runs = {name: Timed(config, clock) for name, config in methods.items()}
    for number in range(1, madry.epochs + 1):
        for run in runs.values():
            run.epoch(number)
    found = {}
    for name, run in runs.items():
        ratio = run.seconds["all"] / runs["Madry"].seconds["all"]
        found[name] = {"backprops": run.backprops, "seconds": run.seconds, "of_madry": ratio}
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in run.seconds.items())
        print(f"{name:24} {run.backprops:5.2f} BPs: {parts}; {ratio:.3f} of Madry's")
    if asked.out is not None:
        where = run_folder.environment(CPU) | {"threads": asked.threads}
        command = f"python benchmarks/bench_cpu_saving.py --threads {asked.threads}{' --recipes' * asked.recipes}"
        asked.out.write_text(json.dumps({"n": 1, **where, "command": command, "methods": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
