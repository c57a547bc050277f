"""SGD of all weights of a model in two Triton launches, whatever the number of tensors.

Torch's rule: m <- momentum * m + (g + weight_decay * w), w <- w - lr * m. Gradients are read in the precision they come
in, and the bf16 copies that a forward pass reads are written on the way, so that no cast needs a launch of its own. The
twin in torch's operations is in update/sgd.py; it is tested against torch's own SGD by Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.engine.layout import like

_BLOCK = 2048


@triton.jit
def _mine(table, units, blocks, BLOCK: tl.constexpr):
    """A program's entry in the table, its places in that tensor, and their mask."""
    program = tl.program_id(0)
    entry = table + tl.load(units + program) * 6
    place = tl.load(blocks + program) * BLOCK + tl.arange(0, BLOCK)
    return entry, place, place < tl.load(entry + 4)


@triton.jit
def _gradient(entry, place, inside):
    """A part of a gradient in fp32, read in its own precision."""
    address = tl.load(entry + 3)
    if tl.load(entry + 5) != 0:
        g = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + place, mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(address.to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
    return g


@triton.jit
def _doubt(table, units, blocks, loss, skip, failed, BLOCK: tl.constexpr):
    """Set both flags where the loss or a block of a gradient is not finite."""
    entry, place, inside = _mine(table, units, blocks, BLOCK)
    g = _gradient(entry, place, inside)
    finite = tl.min((tl.abs(g) < float("inf")).to(tl.int32), 0)  # no comparison with NaN is true
    if (finite == 0) | ((tl.abs(tl.load(loss)) < float("inf")) == 0):
        tl.store(skip, 1.0)
        tl.store(failed, 1.0)


@triton.jit
def _descend(
    table,  # (tensors, 6): addresses of weight, momentum, copy and gradient; a length; whether the gradient is bf16
    units,  # (programs,): which tensor a program works for
    blocks,  # (programs,): and which block of it
    lr,
    skip,
    momentum,
    weight_decay,
    MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the step of one block of a tensor, and of its bf16 copy where it has one; nothing where `skip` is set."""
    entry, place, inside = _mine(table, units, blocks, BLOCK)
    if tl.load(skip) == 0:
        weight = tl.load(entry).to(tl.pointer_type(tl.float32)) + place
        w = tl.load(weight, mask=inside, other=0.0)
        m = _gradient(entry, place, inside) + weight_decay * w
        if MOMENTUM:
            before = tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + place
            m += momentum * tl.load(before, mask=inside, other=0.0)
            tl.store(before, m, mask=inside)
        w -= tl.load(lr) * m
        tl.store(weight, w, mask=inside)
        copy = tl.load(entry + 2)
        if copy != 0:
            tl.store(copy.to(tl.pointer_type(tl.bfloat16)) + place, w.to(tl.bfloat16), mask=inside)


class DescendAll:
    """The step of many tensors. It keeps addresses: weights, momenta and copies must stay in place.

    Gradients lie elsewhere in every step, except in a graph, where they keep their places. Inside a capture nothing can
    be copied from the host: its table is filled by `settle`, before the first replay.
    """

    def __init__(
        self,
        weights: list[Tensor],
        momenta: list[Tensor],
        copies: list[Tensor | None],
        *,
        momentum: float,
        weight_decay: float,
    ) -> None:
        """fp32 weights, their momenta (or none at all), and the bf16 copies of some; each with its weight's strides."""
        self.weights, self.momentum, self.weight_decay = weights, momentum, weight_decay
        self.momenta: list[Tensor] | list[None] = momenta or [None] * len(weights)
        self.copies = copies
        device = weights[0].device
        counts = [triton.cdiv(weight.numel(), _BLOCK) for weight in weights]
        self.units = torch.repeat_interleave(torch.arange(len(weights)), torch.tensor(counts)).to(device)
        self.blocks = torch.cat([torch.arange(count) for count in counts]).to(device)
        self.table = torch.zeros(len(weights), 6, dtype=torch.int64, device=device)
        self.owed: Tensor | None = None  # the contents of a capture's table, until `settle`
        self.captured: list[Tensor] = []  # tables that graphs read

    def __call__(self, loss: Tensor, gradients: list[Tensor], lr: Tensor, skip: Tensor, failed: Tensor) -> None:
        """Take the step; or, where something is not finite, take none and set `skip` and `failed` to 1."""
        pairs = zip(gradients, self.weights, strict=True)
        gradients = [like(gradient, weight, _read(gradient.dtype)) for gradient, weight in pairs]
        rows = self._rows(gradients)
        if _capturing():
            self.owed = rows
        else:
            self.table.copy_(rows)
        program = (self.table, self.units, self.blocks)
        grid = (len(self.units),)
        skip.zero_()
        _doubt[grid](*program, loss, skip, failed, _BLOCK)
        _descend[grid](*program, lr, skip, self.momentum, self.weight_decay, self.momenta[0] is not None, _BLOCK)

    def settle(self) -> None:
        """Fill the table of a capture that has ended, if there was one, and hand it to the graph."""
        if self.owed is not None:
            self.table.copy_(self.owed)
            self.captured.append(self.table)
            # A new one here: made inside a capture it would lie in memory that the graph uses.
            self.table, self.owed = torch.zeros_like(self.table), None

    def _rows(self, gradients: list[Tensor]) -> Tensor:
        """The table, on the host."""
        rows = []
        for tensors in zip(self.weights, self.momenta, self.copies, gradients, strict=True):
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            weight, *_, gradient = tensors
            rows.append([*addresses, weight.numel(), int(gradient.dtype == torch.bfloat16)])
        return torch.tensor(rows)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _read(dtype: torch.dtype) -> torch.dtype:
    """The precision in which the kernels read a gradient."""
    return dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
