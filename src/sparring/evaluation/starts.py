"""PGD from given points, and random starts that belong to the example rather than to the batch.

The start of example i depends on the seed and on i alone: not on the batch size, not on how many images follow, not on
which examples are attacked again. Knows no protocol and no verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from sparring.attacks import Model, ball
from sparring.attacks.checks import call
from sparring.attacks.losses import InnerLoss, Loss
from sparring.attacks.pgd import pgd_loop
from sparring.attacks.threat import Norm
from sparring.seeds import generator

_BLOCK = 256  # examples whose noise one generator draws at once; another value would change what a seed means


class Starts:
    """The starting points of one run of an attack, example by example."""

    def __init__(self, start: ball.Start, *, eps: float, seed: int, purpose: str, norm: Norm = "linf") -> None:
        self.start, self.norm = start, norm
        self.eps = eps
        self.seed = seed
        self.purpose = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:6], "little")
        self._drawn: tuple[int, Tensor] = (
            -1,
            torch.empty(0),
        )  # the last block drawn: the next batch often begins in it

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Starting points for `x`, the examples number `rows` (ascending, on the CPU)."""
        if self.start is None:
            return x.clone()
        noise = torch.cat(list(self._noise(x, rows))).to(x.device)
        scale = self.eps if self.start == "uniform" else ball.START_SIGMA
        return ball.project(x + scale * noise, x, self.eps, self.norm)

    def _noise(self, x: Tensor, rows: Tensor) -> Iterator[Tensor]:
        blocks = rows // _BLOCK
        for block in sorted(set(blocks.tolist())):
            if self._drawn[0] != block:
                draws = generator("cpu", self.seed, self.purpose, block)
                like = torch.empty((_BLOCK, *x.shape[1:]), dtype=x.dtype)
                in_ball = self.start == "uniform"
                drawn = ball.draw_in_ball(like, draws, self.norm) if in_ball else ball.draw_normal(like, draws)
                self._drawn = (block, drawn)
            yield self._drawn[1][rows[blocks == block] - block * _BLOCK]


def pgd_from(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    start: Tensor,
    eps: float,
    step_size: float,
    steps: int,
    loss: Loss,
    norm: Norm = "linf",
    each_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """The images after `steps` steps of PGD from `start`, bitwise those of `attacks.pgd`.

    The model runs as it is given: eval mode is the caller's part. `each_step` is called at every step.
    """

    def steepest(gradient: Tensor, _rows: Tensor) -> Tensor:
        each_step()
        return ball.steepest(gradient, norm)

    return pgd_loop(
        partial(call, model),
        x,
        y,
        start=start,
        eps=eps,
        step_size=step_size,
        steps=steps,
        norm=norm,
        loss=InnerLoss(loss, model, x),
        direction=steepest,
    ).x_adv
