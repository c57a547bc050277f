"""What `sparring bench` measures, part by part. Each part gives rows for the table and data for the JSON.

Times are wall-clock with the device made to finish. The engine, the plain eager path and the literal loop are timed in
the same process on the same batches, so their ratios hold on a shared machine too. Useful FLOPs: images x forward FLOPs
x (2 x BPs + 3); a back-propagation is a forward and an input gradient, an update a forward and both gradients (twice
with adversarial weight perturbation).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparring.attacks import friendly_pgd
from sparring.bench.literal_loop import literal_pgd
from sparring.bench.side_by_side import images_per_second
from sparring.bench.start_up import start_up, told_start
from sparring.bench.timing import Timed, timed, wait
from sparring.data import Dataset, Split, batches, count_batches, hold_out
from sparring.engine import CapturedAttack, Engine, tuned
from sparring.errors import UserError
from sparring.models import forward_flops
from sparring.objectives import OBJECTIVES
from sparring.schedules import constant
from sparring.seeds import generator
from sparring.training import loop, run_folder
from sparring.training.config import Config, model_facts, to_json
from sparring.training.gpu_sharing import fair_share
from sparring.training.state import Tally


@dataclass(frozen=True)
class Options:
    """What to measure."""

    taus: tuple[int, ...] = (0, 1, 3, 5)
    """FAT is timed for an epoch at each tau; the more it is, the more back-propagations."""
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


@dataclass
class Benchmark:
    """One configuration on one device. Call the parts in any order; `found` grows."""

    config: Config
    data: Dataset
    device: torch.device
    options: Options

    def __post_init__(self) -> None:
        given = time.time()
        training, _ = hold_out(self.data.train, self.config.validation, seed=0)
        count = self.options.images or len(training)
        self.training = Split(training.x[:count], training.y[:count]).to(self.device)
        self.facts = model_facts(self.config, self.data)
        self.awp = max(self.config.awp.values())
        self.state = loop.begin(self.config, self.facts, self.device)
        self.found: dict[str, Any] = {
            "config": to_json(self.config),
            "options": dataclasses.asdict(self.options),
            **run_folder.environment(self.device),
        }
        began = time.time()
        self.engine: Engine = loop.engine_for(self.config, self.state, self.data, self.device, "auto")
        x, y = self._batch(0)
        with tuned(self.engine):
            self._attack(self.engine, x, y, tau=0, step=0)
            wait(self.device)
            attacked = time.time()
            self.engine.update(x, x, y, 0.0, self.awp)
        wait(self.device)
        self.start = start_up(given, began, attacked, time.time())
        self.found["start_up"] = self.start
        self.trained = 0  # epochs trained so far
        self.step_times: dict[int, Timed] = {}
        shape = (1, self.data.channels, *self.data.size)
        self.flops = forward_flops(self.state.model, shape)

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
        """How long it took until a step was done: since the model was there, and since the process began."""
        return [("this", self.engine.line), ("first step after", told_start(self.start))]

    def memory(self) -> Rows:
        """The most memory that was in use."""
        if self.device.type != "cuda":
            return [("peak", "not measured on a CPU")]
        self.found["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return [("peak", f"{self.found['peak_gib']:.2f} GiB")]

    def correct(self) -> Rows:
        """In fp32, without TF32: the engine's back-propagations and data against the plain path's."""
        if not isinstance(self.engine.walk, CapturedAttack):
            return [("", "the plain path is the reference: nothing to compare")]
        exact = replace(self.config, precision="fp32")
        state = loop.begin(exact, self.facts, self.device)
        state.model.load_state_dict(self.state.model.state_dict())
        allowed = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        try:
            engine = loop.engine_for(exact, state, self.data, self.device, "auto")
            rows, kept = [], []
            for tau in (0, 2):
                x, y = self._batch(1)
                ours = self._attack(engine, x, y, tau=tau, step=1, model=state.model)
                x_adv, backprops = ours.x_adv.clone(), ours.backprops.clone()
                plain = self._attack(None, x, y, tau=tau, step=1, model=state.model)
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
        x, y = self._batch(0)
        with tuned(self.engine):
            self.update = timed(
                lambda: self.engine.update(x, x, y, 0.0, self.awp), self.device, repeats=self.options.repeats
            )
        self.found["update"] = dataclasses.asdict(self.update)
        rows = [("update", self.update.ms)]
        if isinstance(self.engine.walk, CapturedAttack):
            (bench,) = self.engine.walk.made.values()
            for size, graph in sorted(bench.steps.items()):
                bench.active.begin(x, y, x, tau=self.config.attack.steps, eps=0.03, step_size=0.001)
                self.step_times[size] = timed(graph, self.device, repeats=self.options.repeats, inner=5)
                speed = 2 * size * self.flops / self.step_times[size].median / 1e12
                rows.append((f"attack step at {size}", f"{self.step_times[size].ms}  {speed:.3g} TFLOP/s"))
            bench.taken = int(bench.active.serial.item())
        else:
            rows.append(("attack step", "not measured: the plain path has no steps of fixed sizes"))
        self.found["steps"] = {size: dataclasses.asdict(time) for size, time in self.step_times.items()}
        return rows

    def epochs(self) -> Rows:
        """Real epochs of training, at worst-case and at each tau: time against back-propagations and its own steps."""
        if "steps" not in self.found:
            self.steps()
        self._warm_up()
        self.last_batch()
        settings = {"Madry": self.config.attack.steps} | {f"FAT, tau {tau}": tau for tau in self.options.taus}
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
        """The same batches by the plain eager path and the literal loop, in fp32 as torch has it, beside the engine.

        Each way begins with the same weights and statistics, and goes through all batches once before the clock runs:
        the first meeting with a batch size costs more than all that follow.
        """
        self._warm_up()
        kept_state = {name: tensor.clone() for name, tensor in self.state.model.state_dict().items()}
        state = loop.begin(self.config, self.facts, self.device)
        plain = loop.engine_for(self.config, state, self.data, self.device, "plain")
        kept: list[dict[str, Any]] = []
        rows: Rows = []
        if not isinstance(self.engine.walk, CapturedAttack):
            rows.append(("", "the engine is off here: it is the plain path"))
        for tau in (self.config.attack.steps, *self.options.taus[:2]):
            ways: dict[str, tuple[Engine, torch.nn.Module]] = {
                "engine": (self.engine, self.state.model),
                "plain": (plain, state.model),
                "literal": (plain, state.model),
            }
            times: dict[str, Timed] = {}
            backprops: dict[str, float] = {}
            for way, (engine, model) in ways.items():
                model.load_state_dict(kept_state)
                engine.refresh()
                times[way], backprops[way] = self._batches(way, engine, model, tau)
            over = {way: times[way].median / times["engine"].median for way in ("plain", "literal")}
            each = {way: dataclasses.asdict(time) | {"backprops": backprops[way]} for way, time in times.items()}
            kept.append({"tau": tau, **each, **{f"{way}_over_engine": ratio for way, ratio in over.items()}})
            told = "  ".join(f"{way} {times[way].ms}" for way in ways)
            rows.append(
                (
                    f"a batch at tau {tau}, {backprops['engine']:.2f} BPs",
                    f"{told}  engine is {over['plain']:.1f}x plain, {over['literal']:.1f}x the loop",
                )
            )
        self.state.model.load_state_dict(kept_state)
        self.engine.refresh()
        self.found["plain"] = kept
        return rows

    def side_by_side(self) -> Rows:
        """Images a second of n runs at once, each a process."""
        rows, kept = [], []
        first = 0.0
        config = replace(self.config, lr=constant(0.05))
        for count in self.options.together:
            share = fair_share(count) if self.device.type == "cuda" else 100
            each = images_per_second(
                config,
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

    def _batches(self, way: str, engine: Engine, model: torch.nn.Module, tau: int) -> tuple[Timed, float]:
        """A batch with its update, one behind the other as in training: its seconds, and its mean back-propagations."""
        count, rounds = self.options.plain_batches, self.options.rounds
        taken = torch.zeros((), device=self.device, dtype=torch.float64)
        batch = itertools.cycle(range(count))

        def one() -> None:
            index = next(batch)
            x, y = self._batch(index)
            if way == "literal":
                draws = generator("cpu", self.config.seed, index)
                s = self.config.attack.at(1, 1)
                numbers: dict[str, Any] = {"eps": s.eps, "step_size": s.step_size, "steps": s.steps, "noise": s.noise}
                x_adv, labels, origins, steps = literal_pgd(model, x, y, tau=tau, generator=draws, **numbers)
                engine.update(origins, x_adv, labels, 0.0, self.awp)
                taken.add_(steps / len(x))
            else:
                found = self._attack(engine, x, y, tau=tau, step=index, model=model)
                engine.update(x, found.x_adv, y, 0.0, self.awp)
                taken.add_(found.backprops.double().mean())

        with tuned(engine):
            time = timed(one, self.device, repeats=rounds, warm_up=count, inner=count)
        return time, taken.item() / ((1 + rounds) * count)

    def _warm_up(self) -> None:
        """So many epochs at tau 0, once: a model that has just begun is fooled at once."""
        while self.trained < self.options.before:
            self._next_epoch(0)

    def last_batch(self) -> None:
        """Updates of as many images as an epoch's last batch has: cuDNN tunes, and then a graph is captured."""
        x, y = self._batch(0)
        rest = len(self.training) % self.config.batch_size
        if rest:
            with tuned(self.engine):
                for _ in range(2):
                    self.engine.update(x[:rest], x[:rest], y[:rest], 0.0, self.awp)

    def _next_epoch(self, tau: int) -> dict[str, Any]:
        self.trained += 1
        # The schedules stand still: every epoch is an epoch of as long a run.
        config = replace(self.config, lr=constant(0.05), epochs=self.trained)
        return self.epoch(config, self.trained, tau)

    def epoch(self, config: Config, epoch: int, tau: int) -> dict[str, Any]:
        """One epoch of the real training loop; against its own steps, where they have been timed."""
        config = replace(
            config, objective="fat", attack=replace(config.attack, tau=constant(tau)), awp=constant(self.awp)
        )
        state, walk = self.state, self.engine.walk
        state.epoch, state.step, state.tally = epoch, 0, Tally.empty(self.device)
        before = dict(walk.launched) if isinstance(walk, CapturedAttack) else {}
        steps = count_batches(len(self.training), config.batch_size)
        wait(self.device)
        began = time.perf_counter()
        with tuned(self.engine):
            loop.one_epoch(state, config, self.engine, self.training, steps, [], lambda: None, None, lambda: False)
        wait(self.device)
        seconds = time.perf_counter() - began
        tally = state.tally
        backprops = tally.backprops.item() / tally.images
        row: dict[str, Any] = {
            "seconds": seconds,
            "images": tally.images,
            "backprops": backprops,
            "tflops": tally.images * self.flops * (2 * backprops + (6 if self.awp else 3)) / seconds / 1e12,
        }
        if isinstance(walk, CapturedAttack) and self.step_times:
            launched = {size: walk.launched[size] - before[size] for size in walk.sizes}
            own = sum(count * self.step_times[size].median for size, count in launched.items())
            own += steps * self.update.median
            row |= {"launched": launched, "own_steps_s": own, "over_its_steps": seconds / own}
        return row

    def _attack(
        self, engine: Engine | None, x: Tensor, y: Tensor, *, tau: int, step: int, model: torch.nn.Module | None = None
    ) -> Any:
        setting = replace(self.config.attack.at(1, 1), tau=tau)
        draws = generator(self.device, self.config.seed, step)
        walk = friendly_pgd if engine is None else engine.walk
        return OBJECTIVES["fat"].find(model or self.state.model, x, y, setting, draws, walk)

    def _batch(self, index: int) -> tuple[Tensor, Tensor]:
        size = self.config.batch_size
        begin = index * size % max(1, len(self.training) - size + 1)
        part = slice(begin, begin + size)
        return next(iter(batches(Split(self.training.x[part], self.training.y[part]), size)))


def _over_rounds(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The epochs of one tau: of each quantity the median, of the times and the ratio the spread too."""
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
