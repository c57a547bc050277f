"""What each hand-written part of the engine buys: real batches with and without it, in one process.

For every part that runs for a network, an engine is prepared without it (`engine.PARTS`), from the same weights, and
full batches are timed: the attack of Madry (tau = K) and of FAT (tau 0) and the update behind it. A ratio of 1.10 means
that a batch, and so an epoch, takes 10 % longer without the part. One engine is alive at a time. The complete engine is
timed first and once more at the end: the ratio of the two is the noise.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparring.bench.timing import Timed, timed, wait
from sparring.bench.training import TimedTraining, engine_for
from sparring.data import Dataset
from sparring.engine import EngineKind
from sparring.engine.cuda_graphs import reason
from sparring.errors import UserError
from sparring.training import start
from sparring.training.config import Config

# Parts whose absence means torch.compile come last: they take longest to prepare.
_ORDER = (
    *("fp8", "halves", "split_batch", "refresh", "wide_channels", "fused_sgd"),
    *("attack_step", "manual", "manual_wide", "fused_bn"),
)
_ROUNDS = 3
_WARM_UP = 3


@dataclass(frozen=True)
class AblationOptions:
    """How `--only parts` measures."""

    models: tuple[str, ...] = ()
    """Networks whose parts are measured; small_cnn resnet18 wrn-34-10 on a GPU, else the recipe's own."""
    parts_of: tuple[str, ...] = ()
    """Some of the hand-written parts. All: none named."""
    training_s: float = 3.0
    """Seconds of training before anything is timed: an untrained model is fooled at the first step."""
    timing_s: float = 0.8
    """Seconds that the complete engine's timed batches take, at tau = K and again at tau 0."""
    limit_s: float = 0.0
    """Seconds for one network, after which the remaining parts are skipped. 0: no limit."""

    def __post_init__(self) -> None:
        for name in self.parts_of:
            if name not in _ORDER:
                raise UserError(f"--parts-of knows {' '.join(_ORDER)}, got {name}.")
        for name in ("training_s", "timing_s", "limit_s"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(self, name)}.")


def ablation(
    config: Config,
    data: Dataset,
    device: torch.device,
    options: AblationOptions,
    *,
    images: int = 0,
    kind: EngineKind = "auto",
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> Iterator[tuple[str, str]]:
    """Rows for the table of one network, as they are measured; `keep` gets its data, again with every row."""
    began = time.perf_counter()
    bench = _Ablation(config, data, device, options, images=images, kind=kind)
    found = bench.found
    yield "engine", bench.training.engine.line
    in_use = bench.training.engine.parts
    found["complete"] = complete = bench.timings()
    yield "complete", bench.text(complete, None)
    keep(found)
    for part in options.parts_of or _ORDER:
        if part not in in_use:
            row: dict[str, Any] = {"not_in_use": True}
        elif options.limit_s and time.perf_counter() - began > options.limit_s:
            row = {"skipped": f"skipped: over the limit of {options.limit_s:g} s"}
        else:
            row = bench.without(part, complete)
        found["parts"][part] = row
        keep(found)
        yield f"without {part}", "-" if "not_in_use" in row else row.get("text") or row.get("failed") or row["skipped"]
    found["again"] = again = bench.without("", complete)
    keep(found)
    yield "complete, once more", again.get("text") or again["failed"]


class _Ablation:
    """A model trained for a while, and engines for it with and without a part."""

    def __init__(
        self,
        config: Config,
        data: Dataset,
        device: torch.device,
        options: AblationOptions,
        *,
        images: int,
        kind: EngineKind,
    ) -> None:
        self.config, self.data, self.device, self.kind = config, data, device, kind
        self.training = TimedTraining(config, data, device, images=images, kind=kind)
        self.taus = {"madry": self.training.objective.steps, "fat": 0}
        self._train(options.training_s)
        self.weights = {name: tensor.clone() for name, tensor in self.training.state.model.state_dict().items()}
        batch_s = timed(self._batch(self.taus["madry"]), device, repeats=1, warm_up=1, inner=2).median
        count = min(60, max(12, options.timing_s / batch_s)) if options.timing_s else 1
        self.count = _ROUNDS * max(1, round(count / _ROUNDS))
        self.found: dict[str, Any] = {
            "model": config.model,
            "batch_size": config.batch_size,
            "batches": self.count,
            "rounds": _ROUNDS,
            "line": self.training.engine.line,
            "parts": {},
        }

    def _train(self, seconds: float) -> None:
        """Train at tau 0 for about this long."""
        update, index, began = self.training.engine.update, 0, time.perf_counter()
        with self.training.engine.tuned():
            while time.perf_counter() - began < seconds:
                x, y = self.training.batch(index)
                found = self.training.attack(self.training.engine, x, y, tau=0, step=index)
                update(x, found.x_adv, y, 0.05, self.training.awp)
                index += 1
                if index % 10 == 0:
                    wait(self.device)

    def _batch(self, tau: int) -> Callable[[], None]:
        """The work of one batch: attack and update at rate 0, so that every engine attacks the same weights."""
        index = 0

        def one() -> None:
            nonlocal index
            x, y = self.training.batch(index)
            found = self.training.attack(self.training.engine, x, y, tau=tau, step=index)
            self.training.engine.update(x, found.x_adv, y, 0.0, self.training.awp)
            self.taken.add_(found.backprops.double().mean())
            index += 1

        self.taken = torch.zeros((), device=self.device, dtype=torch.float64)
        return one

    def timings(self) -> dict[str, Any]:
        """Seconds of a batch and its mean back-propagations, for Madry and FAT."""
        row: dict[str, Any] = {}
        for name, tau in self.taus.items():
            self._restore()
            inner = self.count // _ROUNDS
            work = self._batch(tau)
            with self.training.engine.tuned():
                found = timed(work, self.device, repeats=_ROUNDS, warm_up=_WARM_UP, inner=inner)
            row[name] = dataclasses.asdict(found) | {"backprops": self.taken.item() / (_WARM_UP + self.count)}
        return row

    def _restore(self) -> None:
        """The weights and statistics that every timing begins with."""
        self.training.state.model.load_state_dict(self.weights)
        self.training.engine.refresh()

    def without(self, part: str, complete: dict[str, Any]) -> dict[str, Any]:
        """The timings of an engine without a part, and their ratios to the complete one's; or why there are none."""
        began = time.perf_counter()
        try:
            self._rebuild((part,) if part else ())
            row = self.timings()
        except Exception as error:  # out of memory, a compiler that is not there: the other parts go on
            return {"failed": f"failed: {reason(error)}"}
        ratios = {f"{name}_ratio": row[name]["median"] / complete[name]["median"] for name in self.taus}
        row |= ratios | {"line": self.training.engine.line, "prepare_and_time_s": time.perf_counter() - began}
        return row | {"text": self.text(row, ratios)}

    def _rebuild(self, without: Sequence[str]) -> None:
        """A fresh model and engine; the last engine's memory is released first."""
        training = self.training
        vars(training).pop("engine", None)  # none where the last one could not be made
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        training.state = start.begin(self.config, training.facts, self.device)
        training.state.model.load_state_dict(self.weights)
        training.engine = engine_for(self.config, training.state, self.data, self.device, self.kind, without)
        training.state.model.train()

    def text(self, row: dict[str, Any], ratios: dict[str, float] | None) -> str:
        """A row in words."""
        parts = []
        for name, title in (("madry", "Madry"), ("fat", "FAT")):
            time_of = Timed(**{key: row[name][key] for key in ("median", "low", "high", "n")})
            over = "" if ratios is None else f" = {ratios[f'{name}_ratio']:.3f}x"
            parts.append(f"{title} {time_of.ms}{over}, {row[name]['backprops']:.2f} BPs")
        return "  ".join(parts)
