"""One attack walked step by step: where PGD-K goes after it has crossed the boundary, and where PGD-K-tau stops.

Both start at the image itself and take the same steps, so a walk is one path and the step at which the friendly attack
leaves it (paper Sec. 1 and 4.1). The path is made of calls to `attacks`, one image at a time, so that it is bitwise
what they give. Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.attacks import friendly_pgd, pgd
from sparring.attacks.checks import Model, quiet


@dataclass(frozen=True, eq=False)
class Frame:
    """The attack after `step` steps, and what the model makes of it."""

    step: int
    image: NDArray[np.float32]  # (h, w) or (h, w, 3), in [0, 1]
    prediction: str  # a class's name
    right: bool
    confidence: float  # probability of the true class


@dataclass(frozen=True, eq=False)
class Walk:
    """One image's way under PGD-K, and the step at which PGD-K-tau stops on it."""

    label: str  # the true class's name
    tau: int
    frames: tuple[Frame, ...]  # step 0 (the image) to step K
    stopped_at: int  # steps the friendly attack took; K where it never stopped
    eps: float
    step_size: float

    @property
    def steps(self) -> int:
        """K."""
        return len(self.frames) - 1

    @property
    def crossed_at(self) -> int | None:
        """The first step at which the model is wrong."""
        return next((frame.step for frame in self.frames if not frame.right), None)

    @property
    def friendly(self) -> tuple[Frame, ...]:
        """The part of the way that the friendly attack takes."""
        return self.frames[: self.stopped_at + 1]


def walk(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    tau: int,
    classes: Sequence[str] | None = None,
) -> list[Walk]:
    """The walks of PGD-`steps` and PGD-`steps`-`tau` on a few images, one per image. Nothing in it is random.

    Costs steps²/2 gradients per image: meant for the handful that a page shows.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode and left as it was found.
        classes: the classes' names; their numbers where not given.
    """
    walks = []
    for i in range(len(x)):
        image, label = x[i : i + 1], y[i : i + 1]
        path = [image] + [
            pgd(model, image, label, eps=eps, step_size=step_size, steps=k, start=None) for k in range(1, steps + 1)
        ]
        stopped = friendly_pgd(model, image, label, eps=eps, step_size=step_size, steps=steps, tau=tau).backprops
        frames = tuple(_frame(model, k, point, int(label), classes) for k, point in enumerate(path))
        walks.append(Walk(_name(int(label), classes), tau, frames, int(stopped), eps, step_size))
    return walks


def choose(model: Model, x: Tensor, y: Tensor, *, eps: float, step_size: float, steps: int, count: int = 3) -> Tensor:
    """Indices of up to `count` images on which a walk is worth seeing, of different classes where possible.

    Only images that the model gets right and that PGD fools before its last step; first those fooled after two to six
    steps. Among them the best examples: the model sure at first, much lost by walking on after the stop, and an image
    typical of its class, so that a person can read it.
    """
    stop = friendly_pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, tau=0)
    end = pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, start=None)
    first, crossing, last = (_true_class(model, points, y) for points in (x, stop.x_adv, end))
    worth = (first + (crossing - last) - _oddness(x, y)).tolist()  # three parts, each in [0, 1]
    taken, labels = stop.backprops.tolist(), y.tolist()
    fit = [i for i in range(len(x)) if 0 < taken[i] < steps]
    fit.sort(key=lambda i: (not 2 <= taken[i] <= 6, -worth[i]))
    best_of_class = set({labels[i]: i for i in reversed(fit)}.values())
    fit.sort(key=lambda i: i not in best_of_class)  # stable: each part keeps its order
    return torch.tensor(sorted(fit[:count], key=lambda i: labels[i]), dtype=torch.int64)


def _frame(model: Model, step: int, point: Tensor, label: int, classes: Sequence[str] | None) -> Frame:
    with quiet(model), torch.no_grad():
        probabilities = model(point).float().softmax(dim=1)[0]
    prediction = int(probabilities.argmax())
    pixels = point[0].detach().float().cpu().permute(1, 2, 0).numpy()
    return Frame(
        step=step,
        image=pixels[..., 0] if pixels.shape[2] == 1 else pixels,
        prediction=_name(prediction, classes),
        right=prediction == label,
        confidence=float(probabilities[label]),
    )


def _true_class(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The probability of each example's own class."""
    with quiet(model), torch.no_grad():
        return model(x).float().softmax(dim=1).gather(1, y[:, None])[:, 0]


def _oddness(x: Tensor, y: Tensor) -> Tensor:
    """How far each image is from its class's mean image, as the fraction of its class that is nearer."""
    odd = torch.zeros(len(x), device=x.device)
    for label in set(y.tolist()):
        members = (y == label).nonzero()[:, 0]
        far = (x[members] - x[members].mean(dim=0)).flatten(1).norm(dim=1)
        odd[members] = far.argsort().argsort().to(odd.dtype) / len(members)
    return odd


def _name(label: int, classes: Sequence[str] | None) -> str:
    return str(label) if classes is None else classes[label]
