"""One forward pass of a shrinking set of examples, and what its backward pass needs.

A model in two passes (`checks.TwoPasses`) goes back for the examples that go on, and for no others. And on a CPU the
network sees few batch sizes: the set is filled up to the next of 16. Every size of its own costs some milliseconds,
because oneDNN prepares its kernels for each and keeps about a thousand of them; the 64 sizes of a batch of 64 are more
than that. Knows no attack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.attacks.checks import Back, Model

_SIZES = 16  # of a full batch
# Pixels of stopped examples: with fewer, to gather what the backward pass of the others reads costs more than it saves.
# One image of CIFAR-10 has as many, or 48 of the digits.
_FEW = 3072


def rounded(count: int, batch: int) -> int:
    """`count` or a little more: a multiple of a sixteenth of the batch."""
    every = max(1, batch // _SIZES)
    return min(batch, -(-count // every) * every)


def filled(tensor: Tensor, size: int) -> Tensor:
    """The tensor with its first rows repeated behind it, `size` rows in all."""
    count = tensor.shape[0]
    if count == size:
        return tensor
    if size <= 2 * count:
        return torch.cat([tensor, tensor[: size - count]])
    return tensor[torch.arange(size, device=tensor.device) % count]


def run(model: Model, here: Tensor, batch: int, *, gradients: bool) -> tuple[Tensor, Tensor, Back | None]:
    """The point that gradients are taken at; the logits of the examples here; the backward pass by hand.

    The point is filled up to a whole size of a full batch of `batch` examples; at 0 it is what is here.

    The backward pass takes the gradient at the logits of all examples here, and the places of those whose gradient at
    their point is asked for. It is None for a model with autograd, whose logits have their graph.
    """
    count = here.shape[0]
    size = rounded(count, batch) if batch else count
    point = filled(here.detach(), size)
    forward_back = getattr(model, "forward_back", None)
    if forward_back is None or not gradients:
        point = point.detach().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            output = model(point)
        return point, output if size == count else output[:count], None
    logits, passed_back = forward_back(point)

    def back(gradient: Tensor, among: Tensor | None) -> Tensor:
        going = count if among is None else among.shape[0]
        if among is None or (count - going) * here[0].numel() < _FEW:
            whole: Tensor = passed_back(filled(gradient, size), None)[:count]
            return whole if among is None else whole[among]
        places = filled(among, rounded(going, batch) if batch else going)
        of_some: Tensor = passed_back(gradient[places], places)
        return of_some[:going]

    return point, logits[:count].requires_grad_(), back
