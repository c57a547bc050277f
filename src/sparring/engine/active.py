"""The active set on the device: one step of PGD-K-tau without asking the host anything.

Every tensor has a fixed place, so that a step can be captured as a CUDA graph; on the CPU the same code runs as it is
and is tested there against the plain attack. Images stay in the caller's order. `rows` lists the examples that still
walk, first ones first; behind them it points at a spare row, the sink, where what is computed for nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparring import losses

Network = Callable[[Tensor], Tensor]


class ActiveSet:
    """The state of a batch under attack, and the step that moves it on."""

    def __init__(
        self,
        batch: int,
        shape: tuple[int, ...],
        classes: int,
        *,
        steps: int,
        inner: str,
        noise: bool,
        project: bool,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.batch, self.steps, self.inner, self.project = batch, steps, inner, project
        row = (batch + 1, *shape)  # the last one is the sink
        self.x = torch.zeros(row, device=device, dtype=dtype)
        self.x_adv = torch.zeros(row, device=device, dtype=dtype)
        self.natural = torch.zeros(batch + 1, classes, device=device, dtype=dtype) if inner == "kl" else None
        self.kicks = torch.zeros(steps, *row, device=device, dtype=dtype) if noise else None
        self.y = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.tau_left = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.backprops = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.rows = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.places = torch.arange(batch, device=device)
        self.step_index = torch.zeros(1, device=device, dtype=torch.int64)
        self.eps = torch.zeros((), device=device, dtype=dtype)
        self.step_size = torch.zeros((), device=device, dtype=dtype)
        # What the host reads: the number of steps ever taken and the examples that took the last, in one word, so that
        # the two can never be read apart.
        self.serial = torch.zeros(1, device=device, dtype=torch.int64)
        self.report = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def begin(self, x: Tensor, y: Tensor, start: Tensor, *, tau: int, eps: float, step_size: float) -> None:
        """Put a batch in. It may be smaller than the capacity: the rest of the rows point at the sink."""
        count = len(x)
        self.x[:count].copy_(x)
        self.x_adv[:count].copy_(start)
        self.y[:count].copy_(y)
        self.tau_left.fill_(tau)
        self.backprops.zero_()
        self.rows[: self.batch].copy_(torch.where(self.places < count, self.places, self.batch))
        self.rows[self.batch] = self.batch
        self.step_index.zero_()
        self.eps.fill_(eps)
        self.step_size.fill_(step_size)

    def step(self, network: Network, size: int) -> None:
        """One step of the first `size` rows: check, report, gradient, move, compact."""
        rows = self.rows[:size]
        label, tau_left = self.y[rows], self.tau_left[rows]
        point = self.x_adv[rows].requires_grad_()
        logits = network(point)
        wrong = logits.detach().argmax(dim=1) != label
        going = (rows < self.batch) & ~(wrong & (tau_left == 0))
        self._tell(going)  # before the gradient: the host chooses the next bucket while it is computed

        if self.natural is None:
            per_example = losses.cross_entropy(logits, label)
        else:
            per_example = losses.kl(self.natural[rows], logits)
        (gradient,) = torch.autograd.grad(per_example.sum(), point)

        natural = self.x[rows]
        moved = point.detach() + self.step_size * gradient.sign()
        if self.kicks is not None:
            moved = moved + self.kicks.index_select(0, self.step_index)[0][rows]
        if self.project:
            moved = torch.minimum(torch.maximum(moved, natural - self.eps), natural + self.eps)
        moved = moved.clamp(0.0, 1.0)

        target = torch.where(going, rows, self.batch)
        self.x_adv.index_copy_(0, target, moved)
        self.backprops.index_add_(0, target, going.long())
        self.tau_left.index_add_(0, target, -(wrong & going).long())
        # Stable partition: those that go on keep their order, the places behind them point at the sink.
        place = torch.where(going, going.long().cumsum(0) - 1, self.batch)
        self.rows[:size].fill_(self.batch)
        self.rows.index_copy_(0, place, target)
        self.step_index.add_(1).remainder_(self.steps)  # a capture's warm-ups may count beyond the last

    def _tell(self, going: Tensor) -> None:
        self.serial.add_(1)
        self.report.copy_(self.serial * (self.batch + 1) + going.sum(), non_blocking=True)

    def read(self) -> tuple[int, int]:
        """(steps ever taken, examples that took the last), as far as the device has come."""
        serial, count = divmod(int(self.report.item()), self.batch + 1)
        return serial, count
