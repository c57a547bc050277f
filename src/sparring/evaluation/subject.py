"""The subject of an evaluation: a model, images and labels, in batches as large as memory allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from sparring.attacks.checks import HALF, Model, call, check_batch, check_labels, check_logits
from sparring.data.dataset import in_order
from sparring.engine import on
from sparring.engine.attack.replay import Replayed
from sparring.errors import RunFailed, UserError, unknown
from sparring.evaluation.gradient_model import GradientPrecision, gradient_model, query_model
from sparring.evaluation.verdicts import exact
from sparring.shares import WHOLE, Share

_CPU_VALUES = 2**19  # pixels per batch on the CPU: 170 CIFAR-10 images
_CUDA_VALUES = 2**24 - 2**22  # on a GPU: 4096 CIFAR-10 images, halved until they fit

_log = logging.getLogger(__name__)


@dataclass
class Subject:
    """The model and the images, checked."""

    model: Model
    fast: Model  # what gradients are taken from
    steady: Model  # what is asked for logits alone, whose small differences matter
    x: Tensor  # (n, ...), float in [0, 1] or uint8
    y: Tensor  # (n,), int64
    device: torch.device
    dtype: torch.dtype
    classes: int
    precision: str  # of the gradients, as it appears in the result
    batch: int  # the largest batch; shrinks when memory runs out
    share: Share = WHOLE  # of the batches, this process's
    planned: int = 0  # the largest batch that all processes agreed on

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images in [0, 1] and labels of these examples, on the model's device."""
        x, y = in_order(self.x[rows.to(self.x.device)]).to(self.device), self.y[rows.to(self.y.device)].to(self.device)
        return (x.to(self.dtype) / 255 if x.dtype == torch.uint8 else x.to(self.dtype)), y

    def each(
        self, rows: Tensor, work: Callable[[Tensor, Tensor, Tensor], Tensor], *, parted: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, work(x, y, rows)) batch by batch; a batch that does not fit is halved and tried again.

        Of several processes each has some batches of the same list, so that a batch is what it is for one process.
        `parted`: by how much to divide the batch size, for work that needs more memory.
        """
        parts = self._own(rows, parted)
        while parts:
            part = parts.pop(0)
            found = None
            with suppress(torch.OutOfMemoryError):  # whose traceback holds memory
                found = work(*self.take(part), part)
            if found is None:
                if len(part) == 1:
                    raise RunFailed("one image does not fit into the memory of the device.")
                half = len(part) // 2
                if len(part) > self.batch // 2:  # a batch as large as the next attacks would take
                    self.batch = half
                self._release()
                parts = _even(torch.cat([part, *parts]), half)
                continue
            yield part, found

    def _release(self) -> None:
        """Give back memory that a smaller batch needs: that of captures, and what torch keeps."""
        if isinstance(self.fast, Replayed):
            self.fast.forget()
        torch.cuda.empty_cache()

    def count(self, rows: Tensor) -> int:
        """How many of these rows `each` gives to this process."""
        return sum(map(len, self._own(rows)))

    def _own(self, rows: Tensor, parted: int = 1) -> list[Tensor]:
        """The batches of this process. The list of all is the same for every process, whoever ran out of memory."""
        batch, planned = (max(1, size // parted) for size in (self.batch, self.planned))
        if self.share.of == 1:
            return _even(rows, batch)
        own = _even(rows, planned)[self.share.rank :: self.share.of]
        return [piece for part in own for piece in _even(part, batch)]


def _even(rows: Tensor, most: int) -> list[Tensor]:
    """The rows in even batches of at most `most`: no small one at the end."""
    parts, done = [], 0
    while done < len(rows):
        left = len(rows) - done
        size = math.ceil(left / math.ceil(left / most))
        parts.append(rows[done : done + size])
        done += size
    return parts


def check_tensors(x: object, y: object) -> None:
    """Refuse anything but tensors for images and labels."""
    if not isinstance(x, Tensor):
        raise UserError(f"x must be a tensor of images, got {type(x).__name__}. Write torch.as_tensor(x).")
    if not isinstance(y, Tensor):
        raise UserError(f"y must be an int64 tensor of class numbers, got {type(y).__name__}. Write torch.tensor(y).")
    if x.ndim == 0 or y.ndim == 0:
        raise UserError(
            f"x and y must be a batch, one label per image, got shapes {tuple(x.shape)} and {tuple(y.shape)}. "
            "Of a single image give x[None] and y[None]."
        )


def prepare(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    precision: GradientPrecision,
    batch_size: int | None,
    compiled: bool = False,
    share: Share = WHOLE,
) -> Subject:
    """Check all that can be checked before the first step. The model is in eval mode."""
    if precision not in get_args(GradientPrecision):
        if str(precision) == "fp8":
            raise UserError("precision must be fp32 or bf16, got 'fp8': eight bits are for training. Write 'bf16'.")
        raise unknown("precision", str(precision), get_args(GradientPrecision))
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}.")
    check_tensors(x, y)
    if len(x) == 0:
        raise UserError("there are no images to evaluate on. Give at least one.")
    y = y.to(x.device)
    # uint8 images need no check of their range: zeros, one per image, are checked in their place.
    check_batch(torch.zeros(len(x), 1, device=x.device) if x.dtype == torch.uint8 else x, y)
    device, dtype = _home(model, x)
    most = _CUDA_VALUES if device.type == "cuda" else _CPU_VALUES
    automatic = max(1, min(4096 if device.type == "cuda" else 500, most // x[0].numel()))
    name = "fp64" if dtype == torch.float64 else precision
    if name == "fp64" and precision != "fp32":
        _log.warning(f"gradients are float64, as the model is, and not {precision}.")
    subject = Subject(model, model, model, x, y, device, dtype, 0, name, batch_size or automatic, share)
    subject.planned = subject.batch
    with on(device):
        probe, _ = subject.take(torch.arange(min(len(x), 16)))
        subject.classes = _classes(model, probe, y)
        subject.fast = gradient_model(model, probe, precision=precision, most=subject.batch, compiled=compiled)
        subject.steady = query_model(model, subject.fast, probe)
    return subject


def _home(model: Model, x: Tensor) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of the model."""
    own = x.dtype if x.is_floating_point() else torch.float32
    weights = [p for p in model.parameters() if p.is_floating_point()] if isinstance(model, nn.Module) else []
    if not weights:
        return x.device, own
    dtypes = {p.dtype for p in weights}
    if not dtypes <= {torch.float32, torch.float64}:
        raise UserError(
            f"the model's weights are {', '.join(sorted(map(str, dtypes)))}; verdicts are fp32. "
            "Call model.float() first; for speed give precision='bf16'."
        )
    return weights[0].device, weights[0].dtype


@torch.no_grad()
def _classes(model: Model, probe: Tensor, y: Tensor) -> int:
    """The number of classes of the model, checked against the images and labels."""
    try:
        with exact(probe.device):  # as verdicts are, whatever surrounds the call
            logits = call(model, probe)
    except torch.OutOfMemoryError:
        raise RunFailed(f"{len(probe)} images do not fit into the memory of the device.") from None
    check_logits(logits, probe, y[:0])
    if logits.dtype in HALF:  # a verdict from 8 or 11 bits has ties, and argmax gives those to the first class
        raise UserError(
            f"the model's logits are {logits.dtype}; verdicts are fp32. Take autocast and .half() out of the model, "
            "and for speed give precision='bf16'."
        )
    low, high = int(y.min()), int(y.max())
    if low == 1 and high == logits.shape[1]:
        check_labels(y, logits.shape[1])
    if low < 0 or high >= logits.shape[1]:
        raise UserError(
            f"the model has {logits.shape[1]} classes, labels 0 to {logits.shape[1] - 1}; "
            f"found labels {low} to {high}. Give the data set it was trained on."
        )
    return int(logits.shape[1])
