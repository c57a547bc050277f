"""Signed gradient ascent from a given start, and starts that belong to the example rather than to the batch.

`climb` takes the steps of `attacks.pgd` (bitwise the same, by test) from a start the caller drew. The start of example
i depends on the seed and on i alone: not on the batch size, not on how many images follow, not on which examples
are attacked again. Knows no protocol and no verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import InnerLoss, Loss, Model, input_gradient
from sparring.seeds import generator

_BLOCK = 256  # examples whose numbers are drawn by one generator, always together: it fixes what a seed means


class Starts:
    """Where one run of an attack begins, example by example."""

    def __init__(self, start: ball.Start, *, eps: float, seed: int, purpose: str) -> None:
        self.start = start
        self.eps = eps
        self.seed = seed
        self.purpose = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:6], "little")
        self._drawn: tuple[int, Tensor] = (-1, torch.empty(0))  # the last block: the next batch often begins in it

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Starting points for `x`, the examples number `rows` (ascending, on the CPU)."""
        if self.start is None:
            return x.clone()
        noise = torch.cat(list(self._noise(x, rows))).to(x.device)
        scale = self.eps if self.start == "uniform" else ball.START_SIGMA
        return ball.project(x + scale * noise, x, self.eps)

    def _noise(self, x: Tensor, rows: Tensor) -> Iterator[Tensor]:
        blocks = rows // _BLOCK
        for block in sorted(set(blocks.tolist())):
            if self._drawn[0] != block:
                draws = generator("cpu", self.seed, self.purpose, block)
                like = torch.empty((_BLOCK, *x.shape[1:]), dtype=x.dtype)
                draw = ball.draw_uniform if self.start == "uniform" else ball.draw_normal
                self._drawn = (block, draw(like, draws))
            yield self._drawn[1][rows[blocks == block] - block * _BLOCK]


def climb(
    model: Model, x: Tensor, y: Tensor, begin: Tensor, *, eps: float, step_size: float, steps: int, loss: Loss
) -> Tensor:
    """The images after `steps` signed steps from `begin`, each put back into the eps-ball around `x` and [0, 1].

    The model runs as it is given: eval mode is the caller's business. A pixel without a gradient (NaN) stays.
    """
    inner = InnerLoss(loss, model, x)
    x_adv = begin
    for _ in range(steps):
        point = x_adv.detach().requires_grad_()
        gradient = input_gradient(inner(model(point), y), point)
        x_adv = ball.project(x_adv + step_size * gradient.sign().nan_to_num_(0.0), x, eps)
    return x_adv.detach()
