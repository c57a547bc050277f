"""How a step runs fast: precision, folded networks, captured graphs, buckets. Knows no method: it is handed a loss.

`prepare` gives what the training loop needs, the plain way or the fast way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparring.attacks import Found
from sparring.engine.attack.buckets import bucket_sizes
from sparring.engine.attack.folded import Folded, agrees, fold
from sparring.engine.attack.replay import Replayed
from sparring.engine.attack.runner import FastWalk
from sparring.engine.attack.split_batch import Network, Parted
from sparring.engine.ema import Average
from sparring.engine.update.step import Exchange, FastUpdate, LossOf, PlainUpdate, Update, alone
from sparring.objectives import KTauPGD, Search

Kind = Literal["auto", "plain", "fast"]


@dataclass(frozen=True)
class Judged:
    """The model that counts, which is the average where one is kept; and what to take gradients of its input from."""

    model: nn.Module
    gradients: Network


@dataclass(frozen=True)
class Engine:
    """The parts of a training step."""

    model: nn.Module
    walk: FastWalk | None
    step: Update
    network: Network
    line: str
    check_every: int
    average: Average | None = None
    average_folded: Folded | None = None
    refresh: Callable[[], None] = lambda: None
    fixed_sizes: bool = True

    def attack(self, search: Search, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        if self.walk is None or not isinstance(search, KTauPGD):
            return search(self.network, x, y, generator)
        s = search
        return self.walk(
            self.model,
            x,
            y,
            eps=s.eps,
            step_size=s.step_size,
            steps=s.steps,
            tau=s.tau,
            loss=s.loss,
            start=s.start,
            noise=s.noise,
            project=s.project,
            generator=generator,
        )

    def update(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        return self.step(x, x_adv, y, lr, awp)

    def failed(self) -> bool:
        return self.step.failed()

    def judged(self) -> Judged:
        if self.average is None:
            return Judged(self.model, self.network)
        averaged = self.average.read()
        if self.average_folded is None:
            return Judged(averaged, averaged)
        self.average_folded.refresh()
        return Judged(averaged, self.average_folded)

    @contextmanager
    def tuned(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or (self.walk is not None and self.fixed_sizes)
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


def prepare(
    model: nn.Module,
    optimizer: torch.optim.SGD,
    loss: LossOf,
    *,
    batch: int,
    shape: tuple[int, ...],
    classes: int,
    device: torch.device,
    half: bool,
    kind: Kind = "auto",
    ema: float = 0.0,
    exchange: Exchange = alone,
    images: Tensor | None = None,
    fixed_sizes: bool = True,
) -> Engine:
    """The engine for a run.

    Args:
        exchange: takes the loss and the gradients of an update and makes them the mean over all processes, in place;
            in a captured graph, where there is one. The attack needs nothing of the kind: each has its own images.
        half: compute in bf16 (weights stay fp32). Only the fast engine can.
        kind: "auto" takes the fast engine where CUDA is.
        ema: decay of an average of the weights, moved on after every update. 0 for none.
    """
    fast = kind == "fast" or (kind == "auto" and device.type == "cuda")
    cuda = device.type == "cuda"
    if fast and half and cuda:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = Average(model, ema) if ema else None
    if not fast:
        why = "as asked" if kind == "plain" else "captured graphs and bf16 need CUDA"
        plain = PlainUpdate(model, optimizer, loss, average.move if average else _nothing, exchange)
        return Engine(model, None, plain, model, f"engine: plain, fp32 ({why})", 1, average)
    dtype = next(model.parameters()).dtype
    how_to_fold: dict[str, Any] = {"dtype": torch.bfloat16 if half else dtype, "fused": half and cuda}
    every = max(16, batch // 16)  # a bucket costs a second of start-up, or two
    folded = fold(model, **how_to_fold)
    if folded is not None and how_to_fold["fused"]:
        probe = torch.rand((8, *shape), generator=torch.Generator().manual_seed(0)).to(device)
        how_to_fold["fused"] = agrees(folded, model, probe, sizes=bucket_sizes(batch, every=every))
        folded = folded if how_to_fold["fused"] else fold(model, **how_to_fold)
    walked: Network = _as_it_is(model, half) if folded is None else folded
    network = walked
    if folded is not None and folded.passes is not None:  # for searches of an objective's own, whose sets shrink, too
        sizes = (*range(32, batch, 32), batch)
        network = Replayed(folded, sizes=sizes, kept=len(sizes))
    if folded is not None and half and cuda and folded.pointwise:
        # Measured on an H200, batch 128: where batch-norm stands alone and no passes are known, the compiler gains
        # (WRN-34-10 7.6 against 9.1 ms a step); elsewhere it gains 2 % (ResNet-18 1.06 against 1.08) and is not worth
        # its start. Only the walk has it, which calls it in captures alone.
        walked = Parted(torch.compile(folded, dynamic=True) if folded.passes is None else folded, device)

    def after() -> None:
        if folded is not None:
            folded.refresh()
        if average is not None:
            average.move()

    how = "unfolded, for the model cannot be traced" if folded is None else "batch-norm folded"
    if half and cuda and not how_to_fold["fused"]:
        how += ", plain operations, for fused ones fail on this device"
    update = FastUpdate(
        model,
        optimizer,
        loss,
        batch=batch,
        shape=shape,
        device=device,
        half=half,
        compiled=cuda,
        after=after,
        also=list(average.state().values()) if average else (),
        exchange=exchange,
    )
    if update.working.refused:
        how += ", batch-norm in updates by torch's compiler, for our kernels fail on this device"
    walk = FastWalk(walked, batch, shape, classes, device=device, dtype=dtype, every=every)
    captured = "captured graphs" if cuda else "uncaptured: no CUDA"
    line = f"engine: fast, {'bf16' if half else 'fp32'}, {captured}, {how}"
    average_folded = fold(average.model, **how_to_fold) if average else None
    refresh = _nothing if folded is None else folded.refresh
    return Engine(model, walk, update, network, line, 100 if cuda else 1, average, average_folded, refresh, fixed_sizes)


def _nothing() -> None:
    """There is nothing to do after an update."""


def _as_it_is(model: nn.Module, half: bool) -> Network:
    """The model itself in eval mode, for the time of a call."""
    modules = list(model.modules())

    def logits(x: Tensor) -> Tensor:
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=half):
                out: Tensor = model(x)
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
        return out.to(x.dtype)

    return logits
