"""The weight update: plain, or captured as one CUDA graph with the loss, its gradient, SGD and the finite check in it.

Both do the same: loss in train mode, gradient, and, if both are finite, SGD with momentum. The gradient may be taken at
weights that were first moved against the model (adversarial weight perturbation). The captured one keeps the learning
rate in memory, so that a schedule recaptures nothing, and checks on the device: a step that is not finite changes no
weight, and `failed` says so when the host next asks. It runs a working copy of the model (working.py) and moves all
weights at once (sgd.py). Between gradient and check both can be exchanged with other processes: a mean that is not
finite for one is so for all, and all skip the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from sparring.engine.cuda_graphs import Captured
from sparring.engine.manual.fused_ops import descent_for, norms_for
from sparring.engine.update.amp_copy import WorkingCopy
from sparring.engine.update.sgd import Sgd, finite

LossOf = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]  # (model, x, x_adv, y) -> scalar
Exchange = Callable[[list[Tensor]], None]  # makes each tensor the mean over all processes, in place


def alone(tensors: list[Tensor]) -> None:
    """One process has nobody to exchange with."""


class Update(Protocol):
    """One step of the weights."""

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss, detached. `awp` is the size of the weights' perturbation, relative."""

    def failed(self) -> bool:
        """Whether a loss or gradient was not finite, so that a step was not taken. Makes a GPU wait."""


class PlainUpdate:
    """The reference: torch's own SGD, one operation after the other."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.SGD,
        loss: LossOf,
        after: Callable[[], None] = lambda: None,
        exchange: Exchange = alone,
    ) -> None:
        self.model, self.optimizer, self.loss, self.after, self.exchange = model, optimizer, loss, after, exchange
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.bad = False

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, gradients = _gradients(
            lambda: self.loss(self.model, x, x_adv, y),
            list(self.model.buffers()),
            self.parameters,
            self.parameters,
            x.new_tensor(awp) if awp else None,
        )
        self.exchange([loss, *gradients])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.bad = not bool(finite(loss, gradients))
        if not self.bad:
            self.optimizer.step()
            self.after()
        return loss

    def failed(self) -> bool:
        """Whether the last step was not taken."""
        return self.bad


class FastUpdate:
    """The same update as one graph, in bf16 where asked. `after` is work to do behind every update, in the graph."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.SGD,
        loss: LossOf,
        *,
        batch: int,
        shape: tuple[int, ...],
        device: torch.device,
        half: bool,
        compiled: bool,
        after: Callable[[], None],
        also: Sequence[Tensor] = (),
        kernels: ModuleType | None = None,
        norms: tuple[ModuleType, ModuleType] | None = None,
        exchange: Exchange = alone,
    ) -> None:
        """Made once for a run.

        Args:
            also: what else `after` moves step by step, to be put back after a capture's warm-up.
            kernels, norms: stand in for those of the device.
        """
        self.model, self.loss, self.half, self.after, self.also = model, loss, half, after, also
        self.exchange = exchange
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms = norms or (norms_for(device) if half else None)
        self.working = WorkingCopy(
            model, self.parameters, batch=batch, half=half, compiled=compiled, kernels=norms, shape=shape
        )
        kernels = kernels or (descent_for(device) if half else None)
        self.sgd = Sgd(optimizer, self.parameters, self.working.leaves, kernels=kernels)
        self.x = torch.zeros(batch, *shape, device=device)
        self.x_adv = torch.zeros(batch, *shape, device=device)
        self.y = torch.zeros(batch, dtype=torch.int64, device=device)
        self.awp = torch.zeros((), device=device)
        self.value = torch.zeros((), device=device)
        self.graphs: dict[tuple[int, bool], Captured] = {}  # by images, without and with a perturbation of the weights
        self.rest = -1  # images of the last batch that was not full
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss."""
        self.working.refresh()
        self.sgd.lr.fill_(lr)
        self.awp.fill_(awp)
        # The last batch of an epoch: a graph if it comes again. But a capture's warm-up exchanges too, and a process
        # whose last batch has another size would lose step.
        again = len(x) == self.rest and self.exchange is alone
        if len(x) < len(self.x) and not again:
            self.rest = len(x)
            self._step(x, x_adv, y, awp > 0)
            return self.value
        kind = (len(x), awp > 0)
        for ours, given in zip(self._places(len(x)), (x, x_adv, y), strict=True):
            ours.copy_(given)
        if kind not in self.graphs:
            self._capture(*kind)
        self.graphs[kind]()
        return self.value

    def failed(self) -> bool:
        """Whether any step was not taken."""
        return bool(self.sgd.failed.item())

    def _places(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where a graph of so many images reads them, the attacked ones and the labels."""
        return self.x[:count], self.x_adv[:count], self.y[:count]

    def _capture(self, count: int, awp: bool) -> None:
        """Warm up and capture, then put everything back that the warm-up has moved."""
        moved = [*self.model.parameters(), *self.model.buffers(), *self.working.copies]
        moved += [*self.sgd.momenta, self.sgd.failed, *self.also]
        kept = [tensor.detach().clone() for tensor in moved]  # attached, they would tie autograd to this stream
        try:
            self.graphs[count, awp] = Captured(lambda: self._step(*self._places(count), awp), self.pool)
            self.sgd.settle()
        finally:
            with torch.no_grad():
                for tensor, before in zip(moved, kept, strict=True):
                    tensor.copy_(before)

    def _step(self, x: Tensor, x_adv: Tensor, y: Tensor, awp: bool) -> None:
        def loss_here() -> Tensor:
            self.working.forwards = 0  # of two passes the last one counts, as it does for the statistics
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.half):
                return self.loss(self.working.module, x, x_adv, y)

        loss, gradients = _gradients(
            loss_here,
            list(self.working.module.buffers()),
            self.parameters,
            self.working.leaves,
            self.awp if awp else None,
            self.working.aside.gradients,
        )
        with torch.no_grad():
            self.exchange([loss, *gradients])
            self.sgd(loss, gradients)
            self.working.count()
            self.value.copy_(loss)
            self.after()


def _gradients(
    loss_here: Callable[[], Tensor],
    statistics: list[Tensor],
    parameters: list[Tensor],
    leaves: list[Tensor],
    awp: Tensor | None,
    differentiate: Callable[[Tensor, list[Tensor]], Sequence[Tensor]] = torch.autograd.grad,
) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradient; with `awp` both at the weights w + v (AWP, Wu et al. 2020).

    v = awp * ||w|| * g / ||g|| for every weight of more than one dimension, g the gradient at w: the direction in which
    the loss grows, at a length relative to the weight's. One step is taken along it, as its authors do. The pass that
    finds g leaves no trace in the batch-norm statistics. The step is then taken from w. What is differentiated and
    perturbed are the `leaves`: the parameters, or copies of them in another precision.
    """
    if awp is None:
        loss = loss_here()
        # Not backward(): it passes through nodes that remember the stream of an earlier step: that breaks a capture.
        return loss.detach(), list(differentiate(loss, leaves))
    kept = [tensor.clone() for tensor in statistics]
    weights = [(leaf, weight) for leaf, weight in zip(leaves, parameters, strict=True) if weight.dim() > 1]
    uphill = differentiate(loss_here(), [leaf for leaf, _ in weights])
    with torch.no_grad():
        before = [leaf.detach().clone() for leaf, _ in weights]
        for tensor, value in zip(statistics, kept, strict=True):
            tensor.copy_(value)
        for (leaf, weight), g in zip(weights, uphill, strict=True):
            g = g.to(weight.dtype)
            torch.add(weight, awp * weight.norm() / (g.norm() + 1e-12) * g, out=leaf)
    loss, gradients = _gradients(loss_here, statistics, parameters, leaves, None, differentiate)
    with torch.no_grad():
        for (leaf, _), value in zip(weights, before, strict=True):
            leaf.copy_(value)
    return loss, gradients
