"""Which path the attack takes, and why.

`select_attack` tries the fastest path that fits: a hand-written network (in eight bits first, where that is asked for),
the folded graph in fused operations, the folded graph in plain operations, the model itself; each captured as CUDA
graphs, or uncaptured where capturing fails; last the plain attack. Knows no update and no optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparring.attacks.checks import Model
from sparring.engine.attack.buckets import bucket_sizes
from sparring.engine.attack.folded import Folded, NotFolded, fold, fused_mismatch, mismatch
from sparring.engine.attack.replay import Replayed
from sparring.engine.attack.split_batch import SplitBatch, ahead
from sparring.engine.attack.unfolded import Unfolded
from sparring.engine.cuda_graphs import Captured, NotCapturable, pool_for, reason
from sparring.engine.manual.fp8 import Fp8Network, in_fp8
from sparring.engine.triton import tuning
from sparring.engine.triton.available import fp8_for

PROBE = 8  # images on which fused operations are checked


@dataclass(frozen=True)
class Run:
    """What the choice of a path depends on."""

    batch: int
    shape: tuple[int, ...]
    device: torch.device
    half: bool
    fp8: bool
    every: int
    without: frozenset[str]

    @property
    def cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return on_cuda(self.device)


@dataclass(frozen=True)
class AttackPath:
    """One path of the attack."""

    network: Model | None  # what the runner runs; None for the plain attack
    gradients: Model  # what every other search takes gradients from
    folded: Folded | None
    how: str
    captured: bool = True


def select_attack(model: nn.Module, images: Tensor, run: Run) -> AttackPath:
    """The first path of the attack that works."""
    failures: list[str] = []
    for path in _paths(model, images, run, failures):
        try:
            if path.folded is None or path.folded.manual is None:  # a hand-written network was checked at every size
                _rehearse(path.network, images, next(model.parameters()).dtype, run)
        except NotCapturable as error:
            return _with(_undivided(path), f"uncaptured ({error})", failures, captured=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failures.append(f"{path.how} fails: {reason(error)}")
            continue
        return _with(path, "captured" if run.cuda else "uncaptured (no CUDA)", failures, captured=True)
    return AttackPath(None, model, None, f"plain ({'; '.join(failures)})")


def _undivided(path: AttackPath) -> AttackPath:
    """The path without parts on streams of their own, whose memory is safe in captures alone."""
    return replace(path, network=path.network.network) if isinstance(path.network, SplitBatch) else path


def _with(path: AttackPath, captured_how: str, failures: list[str], *, captured: bool) -> AttackPath:
    return replace(path, how=f"{path.how}{because(failures)}, {captured_how}", captured=captured)


def explained(how: str, why: str) -> str:
    """How something runs, and in brackets why not otherwise."""
    return f"{how} ({why})" if how and why else how


def because(failures: list[str]) -> str:
    """The reasons in brackets; empty without any."""
    return f" ({'; '.join(failures)})" if failures else ""


def _paths(model: nn.Module, images: Tensor, run: Run, failures: list[str]) -> Iterator[AttackPath]:
    """The paths of the attack, fastest first; `failures` collects why one was not taken."""
    dtype = next(model.parameters()).dtype
    try:
        exact = fold(model, dtype=dtype, fused=False, without=run.without)
        problem = mismatch(exact, model, images)
    except NotFolded as error:
        problem = str(error)
    if problem:
        failures.append(problem)
    else:
        yield from _folded_paths(model, exact, images, run, failures)
    itself = Unfolded(model, half=run.half)
    yield AttackPath(itself, itself, None, "the model itself")


def _folded_paths(
    model: nn.Module, exact: Folded, images: Tensor, run: Run, failures: list[str]
) -> Iterator[AttackPath]:
    """The paths of a model that can be folded."""
    if run.fp8 and (why := "" if run.half and run.cuda else no_fp8(run.device)):
        failures.append(why)
    for eight in (True, False) if run.half and run.cuda and run.fp8 else (False,) if run.half and run.cuda else ():
        try:
            fused = fold(model, dtype=torch.bfloat16, fused=True, without=run.without)
            problem = _with_eight_bits(fused, images) if eight else ""
            problem = problem or _fused_problem(fused, model, images, run)
        except NotFolded as error:
            problem = str(error)
        if not problem:
            yield from _fused_paths(fused, run)
        elif problem not in failures:
            failures.append(problem)
    plain = fold(model, dtype=torch.bfloat16, fused=False, without=run.without) if run.half else exact
    yield AttackPath(plain, plain, plain, "batch-norm folded")


def _fused_problem(fused: Folded, model: nn.Module, images: Tensor, run: Run) -> str:
    sizes, ahead_of_time = bucket_sizes(run.batch, every=run.every), "compile_ahead" not in run.without
    return fused_mismatch(fused, model, images[:PROBE].float(), sizes=sizes, compile_ahead=ahead_of_time)


def _with_eight_bits(fused: Folded, images: Tensor) -> str:
    """Let the hand-written network run in eight bits; or return why it cannot."""
    found = in_fp8(fused.manual, images[:PROBE].float())
    if isinstance(found, str):
        return found
    fused.manual = found
    return ""


def no_fp8(device: torch.device) -> str:
    """Why nothing runs in eight bits on a device; empty where something may."""
    why = fp8_for(device)
    return why if isinstance(why, str) else ""


def _fused_paths(fused: Folded, run: Run) -> Iterator[AttackPath]:
    """The paths of a network in fused operations."""
    cuts = tuning.of(run.device).cuts if "split_batch" not in run.without else {}
    network: Model = fused
    if fused.manual is not None:
        # Searches of an objective's own have shrinking sets too: captured gradients at a few sizes.
        sizes = (*range(32, run.batch, 32), run.batch)
        eight = isinstance(fused.manual, Fp8Network)
        if fused.pointwise and cuts and not eight:
            network = SplitBatch(fused, run.device, cuts)
        replayed = Replayed(fused, sizes=sizes, kept=len(sizes))
        how = "batch-norm folded, hand-written passes" + (" in fp8 (e4m3; gradients e5m2)" if eight else "")
        yield AttackPath(network, replayed, fused, how)
        return
    if fused.pointwise:
        # Measured on an H200, batch 128: where batch-norm stands alone and the network is not hand-written, the
        # compiler gains (WRN-34-10 7.6 against 9.1 ms a step); elsewhere it gains 2 % (ResNet-18 1.06 against 1.08) and
        # is not worth its start. Only the runner has it, which calls it in captures alone.
        network = SplitBatch(torch.compile(fused, dynamic=True), run.device, cuts)
        yield AttackPath(network, fused, fused, "batch-norm folded, torch.compile")
        network = SplitBatch(fused, run.device, cuts)
    yield AttackPath(network, fused, fused, "batch-norm folded, fused operations")


def _rehearse(network: Model | None, images: Tensor, dtype: torch.dtype, run: Run) -> None:
    """Compute a gradient of a full batch as a captured graph; on a CPU of a few images, uncaptured."""
    assert network is not None
    rows = torch.arange(run.batch if run.cuda else min(PROBE, run.batch), device=images.device) % len(images)
    x = images[rows].to(dtype)

    def work() -> None:
        logits, back = ahead(network, x)
        back(torch.ones_like(logits))

    graph = Captured(work, pool_for(run.device))
    graph()


def on_cuda(device: torch.device) -> bool:
    """Whether a device is a GPU; tests let a CPU pass for one."""
    return device.type == "cuda"
