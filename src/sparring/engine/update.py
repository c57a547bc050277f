"""The weight update: plain, or captured as one CUDA graph with the loss, its gradient, SGD and the finite check in it.

Both do the same: loss in train mode, gradient, and, if both are finite, SGD with momentum. The gradient may be taken at
weights that were first moved against the model (adversarial weight perturbation). The captured one keeps the learning
rate in memory, so that a schedule recaptures nothing, and checks on the device: a step that is not finite changes no
weight, and `failed` says so when the host next asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sparring.engine.graphs import Captured

LossOf = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]  # (model, x, x_adv, y) -> scalar


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
    ) -> None:
        self.model, self.optimizer, self.loss, self.after = model, optimizer, loss, after
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.bad = False

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, gradients = _gradients(
            lambda: self.loss(self.model, x, x_adv, y), self.model, self.parameters, x.new_tensor(awp) if awp else None
        )
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.bad = not bool(_finite(loss, gradients))
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
    ) -> None:
        """`also`: what else `after` moves step by step, to be put back after a capture's warm-up."""
        self.model, self.loss, self.half, self.after, self.also = model, loss, half, after, also
        if compiled:  # torch gives up compiling a forward that eight runs of one process have each their way with
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self.forward: nn.Module = torch.compile(model, dynamic=False) if compiled else model  # type: ignore[assignment]
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.momenta: list[Tensor] = []
        group = optimizer.param_groups[0]
        self.momentum, self.weight_decay = float(group["momentum"]), float(group["weight_decay"])
        for parameter in self.parameters if self.momentum else ():
            # Laid out like its parameter (a checkpoint's is not, under channels_last): the kernel walks both as memory.
            # A momentum of zero gives torch's own first step: m * 0 + g.
            momentum = torch.zeros_like(parameter, requires_grad=False)
            before = optimizer.state[parameter].get("momentum_buffer")
            if before is not None:
                momentum.copy_(before)
            optimizer.state[parameter]["momentum_buffer"] = momentum
            self.momenta.append(momentum)
        self.x = torch.zeros(batch, *shape, device=device)
        self.x_adv = torch.zeros(batch, *shape, device=device)
        self.y = torch.zeros(batch, dtype=torch.int64, device=device)
        self.lr = torch.zeros((), device=device)
        self.awp = torch.zeros((), device=device)
        self.value = torch.zeros((), device=device)
        self.bad = torch.zeros((), device=device)
        self.graphs: dict[bool, Captured] = {}  # without and with a perturbation of the weights
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss."""
        self.lr.fill_(lr)
        self.awp.fill_(awp)
        if len(x) < len(self.x):  # the last batch of an epoch: once, so it is not worth a graph
            self._step(self.model, x, x_adv, y, awp > 0)
            return self.value
        self.x.copy_(x)
        self.x_adv.copy_(x_adv)
        self.y.copy_(y)
        if (awp > 0) not in self.graphs:
            self._capture(awp > 0)
        self.graphs[awp > 0]()
        return self.value

    def failed(self) -> bool:
        """Whether any step was not taken."""
        return bool(self.bad.item())

    def _capture(self, awp: bool) -> None:
        """Warm up and capture, then put everything back that the warm-up has moved."""
        kept = [tensor.detach().clone() for tensor in self._moved()]  # attached, they would tie autograd to this stream
        self.graphs[awp] = Captured(lambda: self._step(self.forward, self.x, self.x_adv, self.y, awp), self.pool)
        with torch.no_grad():
            for tensor, before in zip(self._moved(), kept, strict=True):
                tensor.copy_(before)

    def _moved(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), *self.momenta, self.bad, *self.also]

    def _step(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, awp: bool) -> None:
        def loss_here() -> Tensor:
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.half):
                return self.loss(model, x, x_adv, y)

        loss, gradients = _gradients(loss_here, self.model, self.parameters, self.awp if awp else None)
        skip = 1.0 - _finite(loss, gradients).float()
        with torch.no_grad():
            torch._fused_sgd_(
                self.parameters,
                gradients,
                self.momenta,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                found_inf=skip,
            )
            self.value.copy_(loss)
            self.bad.copy_(torch.maximum(self.bad, skip))
            self.after()


def _gradients(
    loss_here: Callable[[], Tensor], model: nn.Module, parameters: list[Tensor], awp: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradient; with `awp` both at the weights w + v (AWP, Wu et al. 2020).

    v = awp * ||w|| * g / ||g|| for every weight of more than one dimension, g the gradient at w: the direction in which
    the loss grows, at a length relative to the weight's. One step is taken along it, as its authors do. The pass that
    finds g leaves no trace in the batch-norm statistics. The step is then taken from w.
    """
    if awp is None:
        loss = loss_here()
        # Not backward(): it passes through nodes that remember the stream of an earlier step: that breaks a capture.
        return loss.detach(), list(torch.autograd.grad(loss, parameters))
    statistics = list(model.buffers())
    kept = [tensor.clone() for tensor in statistics]
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    uphill = torch.autograd.grad(loss_here(), weights)
    with torch.no_grad():
        before = [weight.detach().clone() for weight in weights]
        for tensor, value in zip(statistics, kept, strict=True):
            tensor.copy_(value)
        for weight, g in zip(weights, uphill, strict=True):
            weight.add_(awp * weight.norm() / (g.norm() + 1e-12) * g)
    loss, gradients = _gradients(loss_here, model, parameters, None)
    with torch.no_grad():
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)
    return loss, gradients


def _finite(loss: Tensor, gradients: list[Tensor]) -> Tensor:
    return torch.isfinite(loss.detach() + torch.nn.utils.get_total_norm(gradients, foreach=True))
