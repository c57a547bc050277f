"""What `sparring bench` measures, part by part. Each part gives rows for the table and data for the JSON.

Times are wall-clock, read after the device has finished. The engine, the plain eager path and the literal loop are
timed in the same process on the same batches, so their ratios hold on a shared machine too. Useful FLOPs: images x
forward FLOPs x (2 x BPs + 3); a back-propagation is a forward pass and an input gradient, an update a forward pass and
both gradients (twice with adversarial weight perturbation).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparring.bench.literal_loop import literal_pgd
from sparring.bench.side_by_side import images_per_second
from sparring.bench.start_up import start_in_words
from sparring.bench.timing import Timed, timed
from sparring.bench.training import TimedTraining, engine_for
from sparring.data import Dataset
from sparring.engine import Engine, EngineKind
from sparring.errors import UserError
from sparring.seeds import generator
from sparring.training import run_folder, start
from sparring.training.config import Config, to_json
from sparring.training.gpu_sharing import fair_share


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to measure."""

    taus: tuple[int, ...] = (0, 1, 3, 5)
    """FAT is timed for an epoch at each tau; a larger tau takes more back-propagations."""
    before: int = 2
    """Epochs at tau 0 before epochs are timed: a model that has just begun is fooled at once."""
    images: int = 0
    """Images of an epoch. 0: all."""
    plain_batches: int = 10
    """Batches that the plain path and the literal loop are timed on."""
    together: tuple[int, ...] = (1, 2, 4)
    """Runs side by side."""
    repeats: int = 20
    """Measurements of a step or an update."""
    rounds: int = 3
    """Measurements of an epoch at each tau, of the plain path and the loop, and of runs side by side."""
    engine: EngineKind = "auto"
    """auto takes the fast engine on CUDA; fast takes it on a CPU too, uncaptured."""

    def __post_init__(self) -> None:
        for name, least in (("before", 0), ("images", 0), ("plain_batches", 1), ("repeats", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} must be at least {least}, got {getattr(self, name)}.")
        if not self.taus or min(self.taus) < 0:
            raise UserError(f"--taus needs numbers of at least 0, got {' '.join(map(str, self.taus)) or 'none'}.")
        if not self.together or min(self.together) < 1:
            raise UserError(
                f"--together needs numbers of at least 1, got {' '.join(map(str, self.together)) or 'none'}."
            )


Rows = list[tuple[str, str]]


class Benchmark:
    """One configuration on one device. Call the parts in any order; `found` grows."""

    def __init__(
        self,
        config: Config,
        data: Dataset,
        device: torch.device,
        options: BenchmarkOptions,
        *,
        without: Sequence[str] = (),
    ) -> None:
        """`without`: hand-written parts of the engine to leave out (engine.PARTS)."""
        self.config, self.data, self.device, self.options = config, data, device, options
        self.training = TimedTraining(config, data, device, images=options.images, kind=options.engine, without=without)
        self.engine, self.state = self.training.engine, self.training.state
        self.found: dict[str, Any] = {
            "config": to_json(config),
            "options": dataclasses.asdict(options),
            "without": list(without),
            **run_folder.environment(device),
            "start_up": self.training.start,
        }
        self.trained = 0  # epochs trained so far
        self.step_times: dict[int, Timed] = {}
        self.update: Timed | None = None

    def parts(self, only: Sequence[str] = ()) -> Iterator[tuple[str, Rows]]:
        """The name and the rows of every part, as it is measured; of those in `only`, where it names any."""
        for name, part in self.every.items():
            if not only or name in only:
                yield name, part()

    @property
    def every(self) -> dict[str, Callable[[], Rows]]:
        """The parts, in their order."""
        return {
            "start-up": self.start_up,
            "correct": self.correct,
            "steps": self.steps,
            "epochs": self.epochs,
            "plain": self.plain,
            "together": self.side_by_side,
            "memory": self.memory,
        }

    def start_up(self) -> Rows:
        """Seconds to the end of the first step: since the model was made, and since the process began."""
        return [("this", self.engine.line), ("first step after", start_in_words(self.training.start))]

    def memory(self) -> Rows:
        """The peak of allocated memory."""
        if self.device.type != "cuda":
            return [("peak", "not measured on a CPU")]
        self.found["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return [("peak", f"{self.found['peak_gib']:.2f} GiB")]

    def correct(self) -> Rows:
        """In fp32, without TF32: the engine's back-propagations and data against the plain path's."""
        if self.engine.runner is None:
            return [("", "the plain path is the reference: nothing to compare")]
        exact = replace(self.config, precision="fp32")
        state = start.begin(exact, self.training.facts, self.device)
        state.model.load_state_dict(self.state.model.state_dict())
        allowed = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        try:
            engine = engine_for(exact, state, self.data, self.device, self.options.engine, rehearse=False)
            rows, kept = [], []
            for tau in (0, 2):
                x, y = self.training.batch(1)
                ours = self.training.attack(engine, x, y, tau=tau, step=1)
                x_adv, backprops = ours.x_adv.clone(), ours.backprops.clone()
                draws = generator(self.device, self.config.seed, 1)
                plain = self.training.search(tau)(state.model, x, y, draws)
                same = int((backprops == plain.backprops).sum())
                near = ((x_adv - plain.x_adv).abs() < 1e-6).double().mean().item()
                kept.append({"tau": tau, "n": len(x), "same_backprops": same, "pixels_equal": near})
                rows.append(
                    (f"tau {tau}", f"{same} of {len(x)} examples take as many steps; {near:.2%} of pixels equal")
                )
        finally:
            torch.backends.cudnn.allow_tf32 = allowed
        self.found["correct"] = kept
        return rows

    def steps(self) -> Rows:
        """An attack step at each bucket, and an update, by the engine."""
        x, y = self.training.batch(0)
        awp, repeats = self.training.awp, self.options.repeats
        with self.engine.tuned():
            self.update = timed(lambda: self.engine.update(x, x, y, 0.0, awp), self.device, repeats=repeats)
        self.found["update"] = dataclasses.asdict(self.update)
        rows = [("update", self.update.ms)]
        if self.engine.runner is not None:
            pgd = self.engine.runner.capture(self.training.search(0))
            for size, graph in sorted(pgd.steps.items()):
                pgd.active.begin(x, y, x, tau=self.training.objective.steps, eps=0.03, step_size=0.001)
                self.step_times[size] = timed(graph, self.device, repeats=repeats, inner=5)
                speed = 2 * size * self.training.flops / self.step_times[size].median / 1e12
                rows.append((f"attack step at {size}", f"{self.step_times[size].ms}  {speed:.3g} TFLOP/s"))
            pgd.taken = int(pgd.active.serial.item())
        else:
            rows.append(("attack step", "not measured: the plain path has no steps of fixed sizes"))
        self.found["steps"] = {size: dataclasses.asdict(time) for size, time in self.step_times.items()}
        return rows

    def epochs(self) -> Rows:
        """Real epochs of training, Madry and FAT at each tau: seconds, back-propagations, the sum of their steps."""
        if "steps" not in self.found:
            self.steps()
        self._warm_up()
        self.training.last_batch()
        settings = {"Madry": self.training.objective.steps} | {f"FAT, tau {tau}": tau for tau in self.options.taus}
        every: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
        for _ in range(self.options.rounds):
            for name, tau in settings.items():
                row = self._next_epoch(tau)
                every[name].append(row)
                row["of_madry"] = row["seconds"] / every["Madry"][-1]["seconds"]  # of the same round
        self.found["epochs"] = kept = [_over_rounds(name, each) for name, each in every.items()]
        rows = []
        for row in kept:
            more = f"  {row['over_its_steps']:.3f} of its own steps" if "over_its_steps" in row else ""
            spread = f"{row['of_madry']:.3f} ({row['of_madry_low']:.3f}-{row['of_madry_high']:.3f}) of Madry"
            rows.append(
                (
                    f"{row['name']}, {row['backprops']:.2f} BPs",
                    f"{Timed(**row['time']).s}  {spread}{more}  {row['tflops']:.3g} TFLOP/s",
                )
            )
        return rows

    def plain(self) -> Rows:
        """The same batches by the plain eager path and the literal loop, in torch's default fp32, and by the engine.

        Each begins with the same weights and statistics, and goes through all batches once before the clock runs:
        the first batch of a size costs more than all that follow.
        """
        self._warm_up()
        kept_state = {name: tensor.clone() for name, tensor in self.state.model.state_dict().items()}
        state = start.begin(self.config, self.training.facts, self.device)
        plain = start.engine_for(self.config, state, self.data, self.device, "plain")
        kept: list[dict[str, Any]] = []
        rows: Rows = []
        if self.engine.runner is None:
            rows.append(("", "the engine is off here: it is the plain path"))
        for tau in (self.training.objective.steps, *self.options.taus[:2]):
            paths: dict[str, tuple[Engine, torch.nn.Module]] = {
                "engine": (self.engine, self.state.model),
                "plain": (plain, state.model),
                "literal": (plain, state.model),
            }
            times: dict[str, Timed] = {}
            backprops: dict[str, float] = {}
            for path, (engine, model) in paths.items():
                model.load_state_dict(kept_state)
                engine.refresh()
                times[path], backprops[path] = self._batches(path, engine, model, tau)
            over = {path: times[path].median / times["engine"].median for path in ("plain", "literal")}
            each = {path: dataclasses.asdict(time) | {"backprops": backprops[path]} for path, time in times.items()}
            kept.append({"tau": tau, **each, **{f"{path}_over_engine": ratio for path, ratio in over.items()}})
            text = "  ".join(f"{path} {times[path].ms}" for path in paths)
            rows.append(
                (
                    f"a batch at tau {tau}, {backprops['engine']:.2f} BPs",
                    f"{text}  engine is {over['plain']:.1f}x plain, {over['literal']:.1f}x the loop",
                )
            )
        self.state.model.load_state_dict(kept_state)
        self.engine.refresh()
        self.found["plain"] = kept
        return rows

    def side_by_side(self) -> Rows:
        """Images per second of n runs at once, each a process."""
        rows, kept = [], []
        first = 0.0
        for count in self.options.together:
            share = fair_share(count) if self.device.type == "cuda" else 100
            each = images_per_second(
                self.config,
                count,
                device=self.device,
                images=self.options.images,
                tau=self.options.taus[0],
                rounds=self.options.rounds,
                share=share,
            )
            speed = statistics.median(each)
            first = first or speed
            kept.append(
                {"runs": count, "share": share, "images_per_second": speed, "over_one": speed / first}
                | {"low": min(each), "high": max(each), "n": len(each)}
            )
            spread = f"({min(each):,.0f}-{max(each):,.0f}, n={len(each)})"
            name = f"{count} at once" + (f", {share} % each" if share < 100 else "")
            rows.append((name, f"{speed:,.0f} images/s {spread}  {speed / first:.2f}x"))
        self.found["together"] = kept
        return rows

    def _batches(self, path: str, engine: Engine, model: torch.nn.Module, tau: int) -> tuple[Timed, float]:
        """Seconds of a batch with its update, batches in a row as in training; and its mean back-propagations."""
        count, rounds, awp = self.options.plain_batches, self.options.rounds, self.training.awp
        taken = torch.zeros((), device=self.device, dtype=torch.float64)
        batch = itertools.cycle(range(count))
        search = self.training.search(tau)
        numbers = {name: getattr(search, name) for name in ("eps", "step_size", "steps", "noise")}

        def one() -> None:
            index = next(batch)
            x, y = self.training.batch(index)
            if path == "literal":
                draws = generator("cpu", self.config.seed, index)
                x_adv, labels, origins, steps = literal_pgd(model, x, y, tau=tau, generator=draws, **numbers)
                engine.update(origins, x_adv, labels, 0.0, awp)
                taken.add_(steps / len(x))
            else:
                found = self.training.attack(engine, x, y, tau=tau, step=index)
                engine.update(x, found.x_adv, y, 0.0, awp)
                taken.add_(found.backprops.double().mean())

        with engine.tuned():
            time = timed(one, self.device, repeats=rounds, warm_up=count, inner=count)
        return time, taken.item() / ((1 + rounds) * count)

    def _warm_up(self) -> None:
        """Train `before` epochs at tau 0, once: an untrained model is fooled at the first step."""
        while self.trained < self.options.before:
            self._next_epoch(0)

    def _next_epoch(self, tau: int) -> dict[str, Any]:
        """One epoch; and the sum of its own steps, where they have been timed."""
        self.trained += 1
        row = self.training.epoch(self.trained, tau)
        if self.step_times and self.update is not None:
            own = sum(count * self.step_times[size].median for size, count in row["launched"].items())
            own += -(-row["images"] // self.config.batch_size) * self.update.median
            row |= {"own_steps_s": own, "over_its_steps": row["seconds"] / own}
        return row


def _over_rounds(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The epochs of one tau: the median of each quantity, and the spread of times and ratios."""
    middle = {
        key: statistics.median(row[key] for row in rows) for key, value in rows[0].items() if isinstance(value, float)
    }
    of_madry = [row["of_madry"] for row in rows]
    launched = {"launched": rows[0]["launched"]} if "launched" in rows[0] else {}
    return {
        "name": name,
        **middle,
        "images": rows[0]["images"],
        "time": dataclasses.asdict(Timed.of([row["seconds"] for row in rows])),
        "of_madry_low": min(of_madry),
        "of_madry_high": max(of_madry),
        "rounds": [{key: row[key] for key in ("seconds", "backprops", "of_madry")} for row in rows],
        **launched,
    }
