"""What an update exchanges with the other processes of a run, between its gradient and its step.

The engine calls it and knows no process group. `training/distributed.py` has the one of several processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn


class Exchange(Protocol):
    """Makes tensors their mean over the images of all processes."""

    not_captured: str  # why it cannot be part of a captured graph; empty where it can

    def __call__(self, tensors: list[Tensor]) -> None:
        """Once in every update: make each tensor the mean, in place, and add up the step's counts."""

    def mean(self, tensors: list[Tensor]) -> None:
        """Make each tensor the mean, in place, and nothing else."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """A block in which only a capture exchanges: other processes do not take part in a warm-up."""


class Alone:
    """There is one process: nothing to exchange."""

    not_captured = ""

    def __call__(self, tensors: list[Tensor]) -> None:
        """Leave the tensors as they are."""

    def mean(self, tensors: list[Tensor]) -> None:
        """Leave the tensors as they are."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """A block like any other."""
        return nullcontext()


ALONE = Alone()


def statistics(model: nn.Module) -> list[Tensor]:
    """The running statistics of batch-norm: the buffers that follow the images of a batch."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [each for layer in layers for each in (layer.running_mean, layer.running_var) if each is not None]


def no_images(parameters: Iterable[Tensor], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradient of a process whose part of the batch is empty: zeros, which weigh nothing."""
    return like.new_zeros(()), [parameter.new_zeros(parameter.shape) for parameter in parameters]
