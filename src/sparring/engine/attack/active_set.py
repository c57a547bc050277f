"""The active set on the device: one step of PGD-K-tau without a question to the host.

Every tensor has a fixed place, so that a step can be captured as a CUDA graph; on the CPU the same code runs uncaptured
and is tested there against the plain attack. Images stay in the caller's order. `rows` lists the examples that still
take steps, in order; behind them it points at a spare row, the sink, which takes what is computed for nothing. Where
Triton runs, the bookkeeping is three launches (triton/attack_step.py); `_judge`, `_compact` and `_move` are the same in
torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from sparring.attacks import ball, losses
from sparring.attacks.checks import Model
from sparring.attacks.threat import Norm
from sparring.engine.attack.split_batch import SplitBatch, ahead
from sparring.engine.manual.manual_network import ManualNetwork
from sparring.seeds import PartGenerator


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
        norm: Norm = "linf",
        dtype: torch.dtype = torch.float32,
        kernels: ModuleType | None = None,
    ) -> None:
        """`kernels` are those of triton/attack_step.py, which read fp32 and move along signs: torch's operations, in
        the same captured graph, run for any other precision and for L2."""
        self.kernels = kernels if dtype == torch.float32 and norm == "linf" else None
        self.batch, self.steps, self.inner, self.project, self.norm = batch, steps, inner, project, norm
        row = (batch + 1, *shape)  # the last one is the sink
        self.x = torch.zeros(row, device=device, dtype=dtype)
        self.x_adv = torch.zeros(row, device=device, dtype=dtype)
        self.natural = torch.zeros(batch + 1, classes, device=device, dtype=dtype) if inner == "kl" else None
        self.kicks = torch.zeros(steps, *row, device=device, dtype=dtype) if noise else None
        self.drawn = torch.zeros(row, device=device, dtype=dtype)  # of a start
        self.y = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.tau_left = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.backprops = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.rows = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.places = torch.arange(batch + 1, device=device)
        self.step_index = torch.zeros(1, device=device, dtype=torch.int64)
        self.numbers = torch.zeros(3, device=device, dtype=dtype)  # eps, step size, sigma of the noise
        self.wrong = torch.zeros(batch, device=device, dtype=torch.int32)
        self.target = torch.full((batch,), batch, device=device)
        self.slots = torch.zeros(batch + 1, device=device, dtype=torch.int32)  # of those that go on, in the last step
        # What the host reads, in one word so that it is always consistent: the number of steps ever taken, and the
        # number of examples that took the last.
        self.serial = torch.zeros(1, device=device, dtype=torch.int64)
        self.report = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.word = self.report.numpy()  # the same memory, without an operation of torch
        # What `check` leaves for `go`: the gradient at the logits, and all values.
        self.checked: tuple[Tensor, list[Tensor]] | None = None

    def begin(
        self, x: Tensor, y: Tensor, start: Tensor, *, tau: int, eps: float, step_size: float, noise: float = 0.0
    ) -> None:
        """Put a batch in. It may be smaller than the capacity: the remaining rows point at the sink."""
        count = len(x)
        self.x[:count].copy_(x)
        self.x_adv[:count].copy_(start)
        self.y[:count].copy_(y)
        self.tau_left.fill_(tau)
        self.backprops.zero_()
        self.rows.copy_(self.places)
        self.rows[count:].fill_(self.batch)
        self.step_index.fill_(-1)  # of the last step taken
        for place, number in enumerate((eps, step_size, noise)):
            self.numbers[place].fill_(number)

    def begin_at_random(
        self,
        x: Tensor,
        y: Tensor,
        *,
        start: ball.Start,
        generator: torch.Generator,
        tau: int,
        eps: float,
        step_size: float,
        noise: float = 0.0,
    ) -> None:
        """`begin` at `ball.random_start`, and draw the noise of all steps in their order."""
        count = len(x)
        kicks = () if self.kicks is None else self.kicks[:, :count]
        if self.kernels is None or x.dtype != torch.float32 or generator.device != x.device:
            begun = ball.random_start(x, eps=eps, start=start, generator=generator, inside=self.project, norm=self.norm)
            self.begin(x, y, begun, tau=tau, eps=eps, step_size=step_size, noise=noise)
            for kick in kicks:
                kick.copy_(ball.draw_normal(x, generator))
            return
        draw = {"uniform": torch.rand, "normal": torch.randn}.get(start or "")
        drawn = self.drawn[:count]
        if draw is not None:
            _draw_into(drawn, draw, generator)
        for kick in kicks:
            _draw_into(kick, torch.randn, generator)
        how = {"eps": eps, "sigma": ball.START_SIGMA, "start": start, "inside": self.project}
        self.kernels.begin(x, None if draw is None else drawn, self.x, self.x_adv, **how)
        state = (self.y, self.tau_left, self.backprops, self.rows, self.step_index, self.numbers)
        self.kernels.reset(y, *state, tau=tau, eps=eps, step_size=step_size, noise=noise)

    def manual(self, network: Model) -> ManualNetwork | None:
        """The hand-written network, where there is one that takes these images."""
        found: ManualNetwork | None = getattr(network, "manual", None)
        return found if found is not None and self.kernels is not None and found.takes(self.x) else None

    def step(self, network: Model, size: int) -> None:
        """One step of the first `size` rows: check, report and compact, then gradient and move."""
        rows = self.rows[:size]
        manual = self.manual(network)
        if manual is not None and not isinstance(network, SplitBatch):
            self._manual_step(manual, rows)
            return
        point = self.x_adv[rows]
        logits, back = network.ahead(point) if isinstance(network, SplitBatch) else ahead(network, point)
        # The report goes out before the gradient: the host chooses the next bucket while it is computed.
        if self.kernels is None:
            output_gradient = self._judge(logits, rows)
            self._compact(size)
        else:
            output_gradient = self._judge_and_compact(logits, rows)
        gradient = back(output_gradient)
        if self.kernels is None:
            self._move(gradient)
        else:
            moving = (self.x_adv, self.x, self.kicks, gradient, self.target, self.numbers, self.step_index)
            self.kernels.move(*moving, project=self.project)

    def _manual_step(self, manual: ManualNetwork, rows: Tensor) -> None:
        """The same with a hand-written network: its first kernel gathers the rows, and its last one moves them."""
        logits, values = manual.forward(self.x_adv, rows)
        gradient = manual.back(self._judge_and_compact(logits, rows), values, sized=False)
        self._manual_move(manual, gradient, self.target)

    def check(self, manual: ManualNetwork) -> None:
        """The first half of a step, for all rows: check, report and compact.

        Captured once: the graphs of `go` read what the last call here has left, and hold no memory themselves.
        """
        self.checked = None  # two of it need not exist at once
        logits, values = manual.forward(self.x_adv, self.rows[: self.batch])
        self.checked = self._judge_and_compact(logits, self.rows[: self.batch]), values

    def go(self, manual: ManualNetwork, size: int) -> None:
        """The second half: gradient and move of the first `size` of those that go on."""
        assert self.checked is not None
        gradient = manual.back(*self.checked, among=self.slots[:size], sized=False)
        self._manual_move(manual, gradient, self.rows[:size])

    def _manual_move(self, manual: ManualNetwork, gradient: Tensor, target: Tensor) -> None:
        state = (self.x_adv, self.x, target, self.kicks, self.numbers, self.step_index)
        manual.move(gradient, *state, project=self.project)

    def _judge_and_compact(self, logits: Tensor, rows: Tensor) -> Tensor:
        """`_judge` and `_compact` in two launches."""
        assert self.kernels is not None
        output_gradient: Tensor = self.kernels.judge(logits, self.natural, rows, self.y, self.wrong)
        state = (self.tau_left, self.backprops, self.serial, self.report, self.step_index)
        numbers = {"size": len(rows), "batch": self.batch, "steps": self.steps}
        self.kernels.compact(self.wrong, self.rows, self.target, self.slots, *state, **numbers)
        return output_gradient

    def _judge(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Mark the examples that are misclassified; return the gradient of the loss at the logits."""
        label, logits = self.y[rows], logits.detach().requires_grad_()
        self.wrong[: len(rows)].copy_(logits.argmax(dim=1) != label)
        per_example = (
            losses.cross_entropy(logits, label) if self.natural is None else losses.kl(self.natural[rows], logits)
        )
        return torch.autograd.grad(per_example.sum(), logits)[0]

    def _compact(self, size: int) -> None:
        """Move the examples that go on to the front, in order; the places behind them point at the sink."""
        rows, wrong = self.rows[:size].clone(), self.wrong[:size].bool()
        going = (rows < self.batch) & ~(wrong & (self.tau_left[rows] == 0))
        self.serial.add_(1)
        self.step_index.add_(1).remainder_(self.steps)  # a capture's warm-ups may count beyond the last
        self.report.copy_(self.serial * (self.batch + 1) + going.sum(), non_blocking=True)
        target = torch.where(going, rows, self.batch)
        self.target[:size].copy_(target)
        self.backprops.index_add_(0, target, going.long())
        self.tau_left.index_add_(0, target, -(wrong & going).long())
        place = torch.where(going, going.long().cumsum(0) - 1, self.batch)
        self.rows[:size].fill_(self.batch)
        self.rows.index_copy_(0, place, target)
        self.slots[:size].zero_()
        self.slots.index_copy_(0, place, self.places[:size].int())

    def _move(self, gradient: Tensor) -> None:
        """Take the steepest step of the norm; examples that have stopped move in the sink."""
        eps, step_size, noise = self.numbers
        target = self.target[: len(gradient)]
        natural = self.x[target]
        moved = self.x_adv[target] + step_size * ball.steepest(gradient, self.norm)
        if self.kicks is not None:
            moved = moved + noise * self.kicks.index_select(0, self.step_index)[0][target]
        moved = ball.project(moved, natural, eps, self.norm) if self.project else moved.clamp(0.0, 1.0)
        self.x_adv.index_copy_(0, target, moved)

    def read(self) -> tuple[int, int]:
        """(steps ever taken, examples that took the last), as last reported by the device."""
        serial, count = divmod(int(self.word[0]), self.batch + 1)
        return serial, count


def _draw_into(place: Tensor, draw: Callable[..., Tensor], generator: torch.Generator) -> None:
    """Draw numbers for every image of a batch, in place where they are for all of it."""
    if isinstance(generator, PartGenerator):
        place.copy_(generator.rows(draw, place.shape[1:], dtype=place.dtype))
    else:
        draw(place.shape, generator=generator, out=place)
