"""AutoAttack by its authors (the package pyautoattack), one part at a time.

The package decides how each part searches; this adapter passes it examples, keeps its seeding and its `.float()` away
from the caller, and returns which examples it claims to have broken. `evaluation` judges the claims. Two deviations,
where the package would crash: no more target classes than there are wrong ones, and with fewer than four classes (the
targeted DLR loss reads four logits) untargeted APGD-DLR, or with two classes nothing, in place of targeted APGD. In the
L-infinity norm the steps of APGD (apgd.py) and FAB (fab.py) and the queries of Square (square.py) are computed here,
faster, to the same points up to rounding. A pixel whose gradient is NaN has none, and an image with NaN in it is no
success. The package is imported when it is first used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sparring.attacks import apgd, ball, fab, square
from sparring.attacks.checks import Model, call, check_batch
from sparring.attacks.eval_mode import frozen
from sparring.attacks.threat import Norm, check_norm, check_radius
from sparring.errors import UserError, unknown

Version = Literal["standard", "rand"]
PARTS = ("apgd-ce", "apgd-t", "apgd-dlr", "fab-t", "square")
_MOST_TARGETS = 9  # of the standard version
_LOCK = threading.Lock()
_NAMES = {"linf": "Linf", "l2": "L2"}  # in pyautoattack's words


@dataclass(frozen=True)
class Claim:
    """What a part of AutoAttack claims to have found."""

    x_adv: Tensor  # inside the ball and [0, 1]; the image itself where nothing was found
    claimed: Tensor  # bool: the package reports that the model it was given is wrong there


def parts(version: Version, *, classes: int) -> tuple[str, ...]:
    """The parts of a version, in the order they run."""
    dlr = ("apgd-dlr",) if classes >= 3 else ()
    if version == "rand":
        return ("apgd-ce", *dlr)
    return ("apgd-ce", *(("apgd-t",) if classes >= 4 else dlr), "fab-t", "square")


@torch.no_grad()
def is_stochastic(model: Model, x: Tensor) -> bool:
    """Whether two forward passes of the same images differ by more than the order of additions explains."""
    with torch.random.fork_rng(devices=_cuda(x)):
        first, second = model(x), model(x)
    scale = float(first.abs().nan_to_num(nan=0.0, posinf=0.0).max().clamp(min=1.0))  # of the finite logits
    return not torch.allclose(first, second, rtol=0.0, atol=1e-4 * scale, equal_nan=True)


def attack_part(
    part: str,
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    norm: Norm = "linf",
    version: Version = "standard",
    seed: int = 0,
    each_call: Callable[[float], None] = lambda share: None,
) -> Claim:
    """Run one part of AutoAttack on these examples, in the ball of this norm.

    The package skips examples that the model gets wrong from the start. It seeds itself anew for every call, so its
    draws depend on how examples are batched.

    Args:
        each_call: called at every call of the model with about its share of all that may come.
    """
    if part not in PARTS:
        raise unknown("part of AutoAttack", part, PARTS)
    check_norm(norm)
    check_radius("eps", eps, norm)
    check_batch(x, y)
    if part == "square" and x.ndim != 4:
        raise UserError(f"Square needs images of shape (n, channels, height, width), got {tuple(x.shape)}.")
    if len(x) == 0:
        return Claim(x.clone(), torch.zeros(0, dtype=torch.bool, device=x.device))

    share = 0.0

    def logits(images: Tensor) -> Tensor:
        each_call(share)
        # The package works in float32 and writes into the logits it gets.
        return call(model, _Clean.apply(images).to(x.dtype)).float().clone()  # type: ignore[no-untyped-call]

    images = x.detach().float()
    with torch.no_grad(), frozen(model), _alone(x):
        classes = call(model, x[:1]).shape[1]
        suite = _suite()(logits, eps=eps, norm=_NAMES[norm], device=x.device, version=version, seed=seed)
        targets = min(_MOST_TARGETS, classes - 1)
        share = 1 / _most_calls(suite, part, targets)
        found = _perturb(suite, part, images, y, targets=targets)
        claimed = (found != images).flatten(1).any(dim=1) & found.flatten(1).isfinite().all(dim=1)
        if x.dtype != images.dtype:  # the package skips what is wrong once it is rounded, which is a point of the ball
            claimed |= logits(images).argmax(dim=1) != y
    x_adv = torch.where(ball.wide(claimed, x), ball.project(found.to(x.dtype), x, eps, norm), x)
    return Claim(x_adv.detach(), claimed)


class _Clean(torch.autograd.Function):
    """The images themselves, with gradients whose NaN are 0."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        return images.view_as(images)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].nan_to_num(0.0)


def _suite() -> Any:
    try:
        from pyautoattack import AutoAttack
    except ImportError:
        raise UserError("AutoAttack needs the package pyautoattack. Run: pip install pyautoattack.") from None
    return AutoAttack


def _most_calls(suite: Any, part: str, targets: int) -> int:
    """The most calls of the model that a part makes, if every image withstands it."""
    if part == "square":
        return 3 + int(suite.square.n_queries)
    if part == "fab-t":
        return 1 + targets * (3 + 2 * int(suite.fab.n_iter))
    search = suite.apgd_targeted if part == "apgd-t" else suite.apgd
    runs = search.n_restarts * (targets if part == "apgd-t" else 1)
    return 1 + int(runs * (1 + search.eot_iter * (1 + search.n_iter)))


def _perturb(suite: Any, part: str, x: Tensor, y: Tensor, *, targets: int) -> Tensor:
    searches = {
        "apgd-ce": suite.apgd,
        "apgd-dlr": suite.apgd,
        "apgd-t": suite.apgd_targeted,
        "fab-t": suite.fab,
        "square": suite.square,
    }
    search = searches[part]
    if part in ("apgd-ce", "apgd-dlr"):
        search.loss = part.removeprefix("apgd-")
    if part == "fab-t":
        search.targeted = True
    search.n_target_classes = targets
    quick: Any = {"fab-t": fab, "square": square}.get(part, apgd)
    if quick.fits(search):
        search.attack_single_run = partial(quick.run, search)
    try:
        found: Tensor = search.perturb(x, y)
    finally:  # an attribute that holds its search would keep it, with model and images, until a collection
        vars(search).pop("attack_single_run", None)
    return found


def _cuda(x: Tensor) -> list[torch.device]:
    return [x.device] if x.is_cuda else []


@contextmanager
def _alone(x: Tensor) -> Iterator[None]:
    """What the package needs of global state, for one thread at a time: random numbers, its log, torch's default type.

    The log is silenced, because `evaluation.sanity` checks for the same flaws.
    """
    logger = logging.getLogger("auto-attack")
    with _LOCK, torch.random.fork_rng(devices=_cuda(x)):
        level, standard = logger.level, torch.get_default_dtype()
        try:
            logger.setLevel(logging.CRITICAL)
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(standard)
            logger.setLevel(level)
