"""Which path a training step takes, and why: chosen here.

`prepare` tries the fastest path that fits and falls back to the next where tracing, compiling or capturing fails. For
the attack see `attack_path`. For the update: fused batch-norm, torch.compile, plain layers; each captured or not; last
the optimiser's own step. `Engine.line` reports the path and every reason. Knows no method: it is handed a loss and
searches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparring.attacks.threat import Norm
from sparring.engine import cpu
from sparring.engine.attack.folded import Folded, fold
from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.attack.split_batch import SplitBatch
from sparring.engine.attack_path import PROBE, Run, because, explained, no_fp8, on_cuda, select_attack
from sparring.engine.cuda_graphs import reason
from sparring.engine.ema import WeightAverage
from sparring.engine.manual.chain import ManualChain
from sparring.engine.manual.fp8 import Fp8Network
from sparring.engine.manual.resnet_fp8 import Fp8ResNet
from sparring.engine.plain import PlainUpdate
from sparring.engine.training_engine import Engine, tuned_sizes
from sparring.engine.triton import tuning
from sparring.engine.triton.available import descent_for, kernels_for, norms_for
from sparring.engine.update.descent import unsupported
from sparring.engine.update.exchange import ALONE, Exchange
from sparring.engine.update.step import BatchLoss, FastUpdate, Update
from sparring.errors import unknown

EngineKind = Literal["auto", "plain", "fast"]
# The hand-written parts, which `prepare(without=...)` leaves out: what each buys is measured by bench/parts.py.
PARTS = {
    "manual": "hand-written forward and backward pass of chains and ResNets in the attack",
    "manual_wide": "hand-written forward and backward pass of wide ResNets in the attack",
    "fp8": "the attack on residual networks in eight bits, where precision asks for it (else bf16)",
    "attack_step": "Triton kernels for the active set, the loss's gradient and the move",
    "halves": "the first step with stops as two graphs, so that stopped examples cost no gradient",
    "split_batch": "input gradients in two parts on two streams",
    "refresh": "the folded network refreshed in one launch",
    "fused_bn": "batch-norm, addition and ReLU fused in the update (else torch.compile)",
    "wide_channels": "convolutions widened to the channels that cuDNN's fast kernels need",
    "fused_sgd": "SGD of one group, finite check and bf16 copies in two launches",
    "compile_ahead": "Triton kernels compiled side by side (start-up only)",
}


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: BatchLoss,
    *,
    batch: int,
    shape: tuple[int, ...],
    classes: int,
    device: torch.device,
    half: bool,
    fp8: bool = False,
    kind: EngineKind = "auto",
    ema: float = 0.0,
    images: Tensor | None = None,
    fixed_sizes: bool = True,
    soft: bool = False,
    clip: float = 0.0,
    norm: Norm = "linf",
    exchange: Exchange = ALONE,
    without: Collection[str] = (),
    rehearse: bool = True,
    plain_because: str = "",
) -> Engine:
    """The engine for a run.

    Args:
        loss: (model, x, x_adv, y) -> scalar.
        batch: images of a full batch.
        shape: of an image.
        half: compute in bf16 (weights stay fp32). Only the fast engine can.
        fp8: compute the attack in eight bits where that is possible; updates as `half` says.
        kind: "auto" takes the fast engine on CUDA.
        ema: decay of an average of the weights, moved after every update. 0 for none.
        images: a few training images in [0, 1], on the device, to check the folded network on; else random ones.
        fixed_sizes: whether the attack runs at few batch sizes, as `KTauPGD` does, so that cuDNN may tune each.
        soft: whether updates come with soft targets, class probabilities; else with class numbers.
        clip: the largest global norm of an update's gradient; a longer one is scaled down. 0 for none.
        norm: of the attack; the Triton kernels of a step are made for "linf", so torch's operations run for "l2".
        exchange: makes loss, gradients and running statistics of an update their mean over all processes; in a
            captured graph, where there is one. The attack needs none: each process has its own images.
        without: hand-written parts to leave out, by their names in `PARTS`.
        rehearse: capture the update now, so that `line` is true from the start; else at its first use.
        plain_because: a reason why only the plain engine can run this.
    """
    for name in without:
        if name not in PARTS:
            raise unknown("part", name, PARTS)
    cuda = on_cuda(device)
    fast = not plain_because and (kind == "fast" or (kind == "auto" and cuda))
    if fast and half and cuda:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = WeightAverage(model, ema) if ema else None
    if images is None:
        images = torch.rand((PROBE, *shape), generator=torch.Generator().manual_seed(0)).to(device)
    if not fast:
        why = plain_because or "as asked" if plain_because or kind == "plain" else "captured graphs need CUDA"
        by_hand = kind == "auto" and device.type == "cpu" and not plain_because
        on_cpu = cpu.attack_for(model, images, half=half) if by_hand else cpu.CPUAttack(None, "")
        refreshed = _nothing if on_cpu.network is None else on_cpu.network.refresh
        after = _both(refreshed, average.move if average else _nothing)
        return Engine(
            model,
            PlainUpdate(model, optimizer, loss, after, exchange, clip),
            on_cpu.network or model,
            head=f"engine: plain, fp32 ({why})",
            attack_how=explained(on_cpu.how, no_fp8(device) if fp8 else ""),
            average=average,
            refresh=refreshed,
            exchange=exchange,
        )

    every = max(tuning.of(device).bucket, batch // 16)  # a bucket costs a second of start-up, or two
    numbers = Run(batch, shape, device, half, fp8 and "fp8" not in without, every, frozenset(without))
    with tuned_sizes(fixed_sizes):
        attack = select_attack(model, images, numbers)
        folded = attack.folded

        def after() -> None:
            if folded is not None:
                folded.refresh()
            if average is not None:
                average.move()

        also = list(average.state().values()) if average else ()
        given: dict[str, Any] = {"after": after, "also": also, "exchange": exchange, "soft": classes if soft else 0}
        given |= {"clip": clip}
        update, update_how = _select_update(model, optimizer, loss, numbers, rehearse=rehearse, **given)
    refresh = _nothing if folded is None else folded.refresh
    refresh()  # the rehearsal of the update has moved the statistics and restored them
    kernels = kernels_for(device) if "attack_step" not in without and norm == "linf" else None
    runner = None
    if attack.network is not None:
        runner = CapturedAttack(
            attack.network,
            batch,
            shape,
            classes,
            device=device,
            dtype=next(model.parameters()).dtype,
            every=every,
            kernels=kernels,
            halves="halves" not in without,
            captured=attack.captured,
        )
    return Engine(
        model,
        update,
        attack.gradients,
        head=f"engine: fast, {'bf16' if half else 'fp32'}",
        attack_how=attack.how,
        update_how=update_how,
        runner=runner,
        average=average,
        average_folded=_folded_average(average, folded, numbers),
        refresh=refresh,
        fixed_sizes=fixed_sizes,
        check_every=100 if cuda and isinstance(update, FastUpdate) else 1,
        parts=_in_use(runner, folded, update, cuda),
        exchange=exchange,
    )


def _select_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: BatchLoss,
    run: Run,
    *,
    after: Callable[[], None],
    also: Collection[Tensor],
    exchange: Exchange,
    soft: int,
    clip: float,
    rehearse: bool,
) -> tuple[Update, str]:
    """The first path of the update that works, and its description."""
    why = unsupported(optimizer, model)
    failures = [why] if why else []
    norms = norms_for(run.device) if run.half and "fused_bn" not in run.without else None
    kernels = descent_for(run.device) if run.half and "fused_sgd" not in run.without else None
    given: dict[str, Any] = {"batch": run.batch, "shape": run.shape, "device": run.device, "half": run.half}
    given |= {"after": after, "also": list(also), "kernels": kernels, "exchange": exchange, "without": run.without}
    given |= {"soft": soft, "clip": clip}
    compiled = run.cuda
    while not why:
        try:
            update = FastUpdate(model, optimizer, loss, norms=norms, compiled=compiled, **given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that cannot be copied
            failures.append(f"the model cannot be copied ({reason(error)})")
            break
        fused = update.amp_copy.fused is not None
        how = "fused batch-norm" if fused else "torch.compile" if compiled else "plain layers"
        try:
            if rehearse:
                update.rehearse()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failures.append(f"{how} fails: {reason(error)}")
            if fused:
                norms = None
            elif compiled:
                compiled = False
            else:
                break
            continue
        if update.amp_copy.not_fused:
            failures.append(update.amp_copy.not_fused)
        captured = f"uncaptured ({update.not_captured})" if update.not_captured else "captured"
        captured = captured if run.cuda or update.not_captured else "uncaptured (no CUDA)"
        return update, f"{how}{because(failures)}, {captured}"
    return PlainUpdate(model, optimizer, loss, after, exchange, clip), f"plain, fp32 ({'; '.join(failures)})"


def _folded_average(average: WeightAverage | None, folded: Folded | None, run: Run) -> Folded | None:
    """The average's folded network, where the model has one."""
    if average is None or folded is None:
        return None
    fused = run.half and run.cuda and any(getattr(unit, "fused", False) for unit in folded.units)
    return fold(average.model, dtype=folded.dtype, fused=fused, without=run.without)


def _in_use(runner: CapturedAttack | None, folded: Folded | None, update: Update, cuda: bool) -> tuple[str, ...]:
    """The hand-written parts that this engine runs."""
    network = runner.network if runner is not None else None
    manual = folded.manual if folded is not None and network is not None else None
    chain = isinstance(manual, ManualChain | Fp8ResNet)
    kernels = runner is not None and runner.kernels is not None
    fused = update.amp_copy.fused if isinstance(update, FastUpdate) else None
    in_use = {
        "manual": chain,
        "manual_wide": manual is not None and not chain,
        "fp8": isinstance(manual, Fp8Network),
        "attack_step": kernels,
        "halves": kernels and manual is not None and runner is not None and runner.halves,
        "split_batch": isinstance(network, SplitBatch) and bool(network.cuts),
        "refresh": folded is not None and bool(folded.refreshed_at_once and folded.refreshed_at_once[1]),
        "fused_bn": fused is not None,
        "wide_channels": any(getattr(layer, "more", 0) or getattr(layer, "fill", False) for layer in _layers(fused)),
        "fused_sgd": isinstance(update, FastUpdate) and update.descent.at_once is not None,
        "compile_ahead": cuda and (manual is not None or fused is not None),
    }
    return tuple(name for name in PARTS if in_use[name])


def _layers(module: nn.Module | None) -> Collection[nn.Module]:
    return [] if module is None else list(module.modules())


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def work() -> None:
        first()
        second()

    return work


def _nothing() -> None:
    """There is nothing to do after an update."""
