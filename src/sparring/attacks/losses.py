"""The losses of the paper, one value per example, shaped like their equations, and the loss of an attack.

Every function maps logits of shape (B, C) to losses of shape (B,); the caller averages. Labels are class numbers, int64
of shape (B,); the losses of an update also take soft targets, float class probabilities of shape (B, C). Nothing here
knows how an attack steps, or a schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.attacks.checks import Model, check_labels
from sparring.attacks.eval_mode import input_gradient
from sparring.attacks.threat import is_number
from sparring.errors import UserError

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]  # (logits, y) -> one loss per example
Loss = Literal["ce", "kl", "cw"] | PerExampleLoss


def soft_targets(
    y: Tensor, classes: int, *, smoothing: float = 0.0, other: Tensor | None = None, share: Tensor | float | None = None
) -> Tensor:
    """Class probabilities of shape (B, classes), float32: the targets of label smoothing and of mixed images.

    Args:
        y: int64 (B,), the class of each image.
        smoothing: the part of the probability that is spread over all classes.
        other: int64 (B,), the class of what was mixed into each image.
        share: the part of each image that is still of its class `y`, the rest is of `other`: float (B,), or one number
            for all.
    """
    if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.dim() != 1:
        found = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise UserError(f"y must be class numbers, an int64 tensor of shape (B,), got {found}.")
    if type(classes) is not int or classes < 2:
        raise UserError(f"classes must be a whole number of at least 2, got {classes!r}. Write for example 10.")
    if not is_number(smoothing) or not 0 <= smoothing < 1:
        raise UserError(f"smoothing must lie in [0, 1), got {smoothing!r}. Write for example 0.1.")
    if (other is None) != (share is None):
        raise UserError("other and share belong together: the class mixed in, and the part that is not.")
    if share is not None and not _is_share(share, len(y)):
        found = f"a tensor of shape {tuple(share.shape)}" if isinstance(share, Tensor) else repr(share)
        raise UserError(
            f"share must be a number in [0, 1], or a tensor with one for each of {len(y)} images, got {found}."
        )
    if y.device.type == "cpu":  # elsewhere a check would wait for the device
        check_labels(y, classes)
    mine = torch.zeros(len(y), classes, device=y.device)
    mine.scatter_(1, y[:, None], 1.0)
    if other is not None and share is not None:
        theirs = torch.zeros_like(mine).scatter_(1, other[:, None], 1.0)
        weight = share.to(mine.dtype)[:, None] if isinstance(share, Tensor) else float(share)
        mine = torch.lerp(theirs, mine, weight)
    return mine * (1 - smoothing) + smoothing / classes if smoothing else mine


def _is_share(share: object, images: int) -> bool:
    """Whether this is one share for all images, or a tensor of one per image, whose values are not looked at."""
    return share.shape == (images,) if isinstance(share, Tensor) else is_number(share) and 0 <= share <= 1


def dominant(y: Tensor) -> Tensor:
    """The class of the largest share, int64 of shape (B,); class numbers as they are."""
    return y.argmax(dim=1) if isinstance(y, Tensor) and y.is_floating_point() else y


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log p_y; of soft targets its mean over them, -sum_k y_k log p_k."""
    return F.cross_entropy(logits, y.to(logits.dtype) if y.is_floating_point() else y, reduction="none")


def kl(logits_nat: Tensor, logits_adv: Tensor) -> Tensor:
    """KL(p_nat || p_adv), the gradient flowing through both."""
    log_nat, log_adv = F.log_softmax(logits_nat, dim=1), F.log_softmax(logits_adv, dim=1)
    return (log_nat.exp() * (log_nat - log_adv)).sum(dim=1)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{k != y} z_k - z_y: above 0 where the model is wrong. The loss of C&W_inf.

    The published code clamps it at a confidence of 50, which real logits never reach: without it, the same function.
    """
    z_y = logits.gather(1, y[:, None])[:, 0]
    return best_wrong(logits, y) - z_y


def probability_margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{k != y} p_k - p_y, in [-1, 1]: above 0 where the model is wrong."""
    return margin(logits.softmax(dim=1), y)


def best_wrong(scores: Tensor, y: Tensor) -> Tensor:
    """The largest score among the wrong classes."""
    return scores.scatter(1, y[:, None], -torch.inf).amax(dim=1)


def boosted_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """MART's BCE: -log p_y - log(1 - max_{k != y} p_k); of soft targets the wrong classes are all but the largest.

    The constants keep the logarithm finite and are the published ones.
    """
    p = F.softmax(logits, dim=1)
    wrong = p.scatter(1, dominant(y)[:, None], -1.0).argmax(dim=1)  # an index has no gradient, as in argsort
    p_wrong = p.gather(1, wrong[:, None])[:, 0]
    return cross_entropy(logits, y) - torch.log(1.0001 - p_wrong + 1e-12)


def mart_weighted_kl(logits_nat: Tensor, logits_adv: Tensor, y: Tensor) -> Tensor:
    """MART's second term: KL(p_nat || p_adv) * (1 - p_nat[y]), the weight not detached; p_nat[y] is sum_k y_k p_k.

    log p_nat comes from the logits: the published log(p_nat) has no finite gradient where p_nat underflows.
    """
    log_nat, p_adv = F.log_softmax(logits_nat, dim=1), F.softmax(logits_adv, dim=1)
    p_nat = log_nat.exp()
    divergence = (p_nat * (log_nat - torch.log(p_adv + 1e-12))).sum(dim=1)
    p_y = (p_nat * y).sum(dim=1) if y.is_floating_point() else p_nat.gather(1, y[:, None])[:, 0]
    return divergence * (1.0000001 - p_y)


class InnerLoss:
    """The loss that an attack maximises. "kl" stores the clean logits of the whole batch, computed once.

    With a `target` (one class per example of the batch) it is the negative loss of the target: its maximum leads there.
    """

    def __init__(self, loss: Loss, model: Model, x: Tensor, target: Tensor | None = None) -> None:
        self.loss, self.target = loss, target
        self.natural: Tensor | None = None
        if loss == "kl":
            with torch.no_grad():
                self.natural = model(x)

    def __call__(self, logits: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """Losses of shape (B,) of the examples number `rows` of the batch."""
        if self.target is not None:
            return -self._of(logits, self.target[rows], rows)
        return self._of(logits, y, rows)

    def gradient(self, logits: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """The gradient of each example's loss at its logits. Of "ce" it is p - 1_y, faster than by autograd."""
        if self.loss == "ce" and self.target is None:
            p = F.softmax(logits.detach(), dim=1)
            return p.scatter_add_(1, y[:, None], p.new_full((len(y), 1), -1.0))
        return input_gradient(self(logits, y, rows), logits)

    def _of(self, logits: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        if self.natural is not None:
            return kl(self.natural[rows], logits)
        if self.loss == "ce":
            return cross_entropy(logits, y)
        if self.loss == "cw":
            return margin(logits, y)
        assert callable(self.loss)
        values = self.loss(logits, y)
        if not isinstance(values, Tensor) or values.shape != y.shape:
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(f"the loss must give one value per example, shape {tuple(y.shape)}, got {found}.")
        return values
