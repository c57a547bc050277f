"""One attack step by step: where PGD-K goes after it has crossed the boundary, and where PGD-K-tau stops.

Both start at the image itself and take the same steps, so one path shows both: PGD-K-tau leaves it at a step (paper
Sec. 1 and 4.1). Images are attacked one at a time, so that a frame is bitwise what the attack of that image returns.
Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.attacks import Model, friendly_pgd, pgd
from sparring.attacks.checks import check_batch, check_settings, checked
from sparring.attacks.eval_mode import eval_mode
from sparring.attacks.friendly import TauLeft
from sparring.attacks.losses import InnerLoss
from sparring.attacks.pgd import Iterate, pgd_loop
from sparring.attacks.threat import Norm


@dataclass(frozen=True, eq=False)
class Frame:
    """The attack after `step` steps, and what the model predicts there."""

    step: int
    image: NDArray[np.float32]  # (h, w) or (h, w, 3), in [0, 1]
    prediction: str  # a class's name
    right: bool
    confidence: float  # probability of the true class


@dataclass(frozen=True, eq=False)
class AttackPath:
    """The path of PGD-K on one image, and the step at which PGD-K-tau stops on it."""

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
        """The part of the path that the friendly attack takes."""
        return self.frames[: self.stopped_at + 1]


def attack_path(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    tau: int,
    norm: Norm = "linf",
    classes: Sequence[str] | None = None,
) -> list[AttackPath]:
    """The paths of PGD-`steps` and PGD-`steps`-`tau`, one per image. Nothing in them is random.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode and left as it was found.
        classes: the classes' names; their numbers where not given.
    """
    check_settings(eps=eps, step_size=step_size, steps=steps, loss="ce", tau=tau, norm=norm)
    check_batch(x, y)
    paths = []
    with eval_mode(model):
        predict = checked(model, y)
        for i in range(len(x)):
            image, label = x[i : i + 1].detach().clone(), y[i : i + 1].clone()
            path = _Recorder(TauLeft(tau, label), steps, classes)
            inner = InnerLoss("ce", predict, image)
            lengths: dict[str, Any] = {"eps": eps, "step_size": step_size, "steps": steps, "norm": norm}
            pgd_loop(predict, image, label, start=image, loss=inner, hook=path, **lengths)
            name = _name(int(label), classes)
            paths.append(AttackPath(name, tau, tuple(path.frames), path.stopped_at, eps, step_size))
    return paths


class _Recorder:
    """A hook that turns the iterates of one image into frames, and asks where the friendly attack would stop."""

    def __init__(self, rule: TauLeft, steps: int, classes: Sequence[str] | None) -> None:
        self.rule, self.steps, self.classes = rule, steps, classes
        self.frames: list[Frame] = []
        self.stopped_at = steps

    def __call__(self, at: Iterate) -> None:
        if at.step < self.stopped_at and bool(self.rule(at)):  # nothing is checked after the last step
            self.stopped_at = at.step
        self.frames.append(_frame(at, self.classes))


def choose(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    count: int = 3,
) -> Tensor:
    """Indices of up to `count` images whose attack path is worth seeing, of different classes where possible.

    Only images that the model gets right and that PGD fools before its last step; first those fooled after two to six
    steps. Among them the best examples: the model confident at first, much probability lost after the stop, and an
    image close to the mean of its class, so that a person can read it.
    """
    stop = friendly_pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, tau=0, norm=norm)
    end = pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, start=None, norm=norm)
    first, crossing, last = (_true_class(model, points, y) for points in (x, stop.x_adv, end))
    worth = (first + (crossing - last) - _oddness(x, y)).tolist()  # three terms, each in [0, 1]
    taken, labels = stop.backprops.tolist(), y.tolist()
    fit = [i for i in range(len(x)) if 0 < taken[i] < steps]
    fit.sort(key=lambda i: (not 2 <= taken[i] <= 6, -worth[i]))
    best_of_class = set({labels[i]: i for i in reversed(fit)}.values())
    fit.sort(key=lambda i: i not in best_of_class)  # stable: each part keeps its order
    return torch.tensor(sorted(fit[:count], key=lambda i: labels[i]), dtype=torch.int64)


def _frame(at: Iterate, classes: Sequence[str] | None) -> Frame:
    """The frame of an iterate of one image."""
    probabilities, label = at.logits.float().softmax(dim=1)[0], int(at.y)
    prediction = int(probabilities.argmax())
    pixels = at.x_adv[0].float().cpu().permute(1, 2, 0).numpy()
    return Frame(
        step=at.step,
        image=pixels[..., 0] if pixels.shape[2] == 1 else pixels,
        prediction=_name(prediction, classes),
        right=prediction == label,
        confidence=float(probabilities[label]),
    )


def _true_class(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The probability of each example's own class."""
    with eval_mode(model), torch.no_grad():
        return model(x).float().softmax(dim=1).gather(1, y[:, None])[:, 0]


def _oddness(x: Tensor, y: Tensor) -> Tensor:
    """The distance of each image from its class's mean image, as the fraction of its class that is nearer."""
    odd = torch.zeros(len(x), device=x.device)
    for label in set(y.tolist()):
        members = (y == label).nonzero()[:, 0]
        far = (x[members] - x[members].mean(dim=0)).flatten(1).norm(dim=1)
        odd[members] = far.argsort().argsort().to(odd.dtype) / len(members)
    return odd


def _name(label: int, classes: Sequence[str] | None) -> str:
    return str(label) if classes is None else classes[label]
