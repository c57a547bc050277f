"""The fast weight update: loss, gradient, the optimiser's step and the finite check in one captured CUDA graph.

The learning rate lies in memory, so that a schedule recaptures nothing, and the check runs on the device: a step that
is not finite changes no weight, and `failed` reports it when the host next asks. It runs a copy of the model
(amp_copy.py), may take the gradient at perturbed weights (awp.py) and moves all weights at once (descent.py). Between
gradient and check both are exchanged with the other processes, in the same graph: a mean that is not finite for one is
so for all, and all skip the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from sparring.engine.cuda_graphs import Captured, NotCapturable, draws_on_the_host, pool_for
from sparring.engine.update.amp_copy import AmpCopy
from sparring.engine.update.awp import gradients
from sparring.engine.update.descent import Descent
from sparring.engine.update.exchange import ALONE, Exchange, no_images, statistics

# (model, x, x_adv, y) -> scalar; y: int64 class numbers (B,), or float class probabilities (B, classes)
BatchLoss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


class Update(Protocol):
    """One step of the weights."""

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss, detached. `awp` is the relative size of the weights' perturbation."""

    def failed(self) -> bool:
        """Whether a loss or gradient was not finite, so that a step was not taken. Waits for the GPU."""


class FastUpdate:
    """The update as one graph, in bf16 where asked."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: BatchLoss,
        *,
        batch: int,
        shape: tuple[int, ...],
        device: torch.device,
        half: bool,
        compiled: bool,
        after: Callable[[], None],
        soft: int = 0,
        clip: float = 0.0,
        also: Sequence[Tensor] = (),
        kernels: ModuleType | None = None,
        norms: tuple[ModuleType, ModuleType] | None = None,
        exchange: Exchange = ALONE,
        without: Collection[str] = (),
    ) -> None:
        """Made once for a run.

        Args:
            compiled: run the forward pass through torch.compile, where the kernels of `norms` do not fit.
            after: work to do behind every update, in the graph.
            soft: classes of the soft targets that full batches come with; 0 where they come with class numbers.
            clip: the largest global norm of a gradient; 0 for none.
            also: what else `after` moves step by step, to be restored after a capture's warm-up.
            kernels: triton/sgd.py, where it can run.
            norms: triton/batch_norm.py and triton/pooling.py, where they can run.
            without: hand-written parts to leave out: wide_channels, compile_ahead (engine/select.py).
        """
        self.model, self.loss, self.half, self.after, self.also = model, loss, half, after, also
        self.exchange, self.statistics = exchange, statistics(model)
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.amp_copy = AmpCopy(
            model,
            self.parameters,
            batch=batch,
            half=half,
            compiled=compiled,
            kernels=norms,
            shape=shape,
            without=without,
        )
        self.descent = Descent(optimizer, self.parameters, self.amp_copy.leaves, kernels=kernels, clip=clip)
        self.x = torch.zeros(batch, *shape, device=device)
        self.x_adv = torch.zeros(batch, *shape, device=device)
        self.soft, self.y = soft, dict[int, Tensor]()  # by the classes of soft targets; 0 for class numbers
        self.awp = torch.zeros((), device=device)
        self.value = torch.zeros((), device=device)
        self.graphs: dict[tuple[int, bool, int], Captured] = {}  # by images, perturbation of the weights, soft targets
        self.rest = -1  # images of the last batch that was not full
        self.not_captured = exchange.not_captured  # the reason, where the step runs uncaptured
        self.pool = None if self.not_captured else pool_for(device)

    def rehearse(self) -> None:
        """Capture the step of a full batch, in train mode. Weights and statistics do not move.

        Raises what the model's operations raise; where only the capture fails, the step runs uncaptured.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            if not self.model.training:
                self.model.train()
            self.amp_copy.refresh()
            self._captured(len(self.x), False, self.soft)
        finally:
            for module, training in modes:
                module.training = training

    def __call__(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Take the step and return the loss."""
        if self.amp_copy.refresh():
            self.graphs.clear()  # captured in other modes
        self.descent.lr.fill_(lr)
        self.awp.fill_(awp)
        again = len(x) == self.rest and len(x) > 0  # the last batch of an epoch: a graph if it comes again
        if len(x) < len(self.x) and not again:
            self.rest = len(x)
            self._step(x, x_adv, y, awp > 0)
            return self.value
        soft = y.shape[1] if y.is_floating_point() else 0
        for ours, given in zip(self._places(len(x), soft), (x, x_adv, y), strict=True):
            ours.copy_(given)
        self._captured(len(x), awp > 0, soft)()
        return self.value

    def failed(self) -> bool:
        """Whether any step was not taken."""
        return bool(self.descent.failed.item())

    def _places(self, count: int, soft: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where a graph of `count` images reads them, the adversarial ones and the targets."""
        if soft not in self.y:
            shape = (len(self.x), soft) if soft else (len(self.x),)
            self.y[soft] = torch.zeros(shape, dtype=torch.float32 if soft else torch.int64, device=self.x.device)
        return self.x[:count], self.x_adv[:count], self.y[soft][:count]

    def _captured(self, count: int, awp: bool, soft: int) -> Captured:
        """The step of `count` images, captured at its first use; uncaptured where it cannot be."""
        kind = (count, awp, soft)
        if kind not in self.graphs:
            try:
                self.graphs[kind] = self._capture(count, awp, soft)
            except NotCapturable as error:
                self.not_captured, self.pool = str(error), None
                self.graphs.clear()
                self.graphs[kind] = self._capture(count, awp, soft)
        return self.graphs[kind]

    def _capture(self, count: int, awp: bool, soft: int) -> Captured:
        """Warm up and capture, then restore everything that the warm-up has moved."""
        moved = [*self.model.parameters(), *self.model.buffers(), *self.amp_copy.copies]
        moved += [*self.descent.state, self.descent.failed, *self.also]
        kept = [tensor.detach().clone() for tensor in moved]  # attached, they would tie autograd to this stream
        try:
            places = self._places(count, soft)  # made here: inside a capture their memory would be the graph's
            # What a warm-up draws (dropout) must not shift the draws of the step itself.
            cuda = [torch.cuda.current_device()] if self.x.is_cuda else []
            with torch.random.fork_rng(devices=cuda), draws_on_the_host() as drawn, self.exchange.rehearsal():
                graph = Captured(lambda: self._step(*places, awp), self.pool)
            if self.pool is not None and drawn():
                raise NotCapturable("the network draws from numpy's or Python's generator")
            self.descent.settle()
        finally:
            with torch.no_grad():
                for tensor, before in zip(moved, kept, strict=True):
                    tensor.copy_(before)
        return graph

    def _step(self, x: Tensor, x_adv: Tensor, y: Tensor, awp: bool) -> None:
        loss, found = self._gradients(x, x_adv, y, awp)
        with torch.no_grad():
            self.exchange([loss, *found, *self.statistics])
            self.descent(loss, found)
            self.amp_copy.count()
            self.value.copy_(loss)
            self.after()

    def _gradients(self, x: Tensor, x_adv: Tensor, y: Tensor, awp: bool) -> tuple[Tensor, list[Tensor]]:
        leaves = self.amp_copy.leaves
        if len(x) == 0:
            if awp:  # the others exchange the direction of the perturbation first
                weights = zip(leaves, self.parameters, strict=True)
                self.exchange.mean([torch.zeros_like(leaf) for leaf, weight in weights if weight.dim() > 1])
            return no_images(leaves, self.value)

        def loss_here() -> Tensor:
            self.amp_copy.forwards = 0  # with a perturbation the second pass counts, as it does for the statistics
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.half):
                return self.loss(self.amp_copy.module, x, x_adv, y)

        statistics = list(self.amp_copy.module.buffers())
        size = self.awp if awp else None
        return gradients(loss_here, statistics, self.parameters, leaves, size, self.exchange)
