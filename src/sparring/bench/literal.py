"""PGD-K-tau the way it is usually written: a Python loop over the examples of the batch at every step.

Each example is looked at on its own: its prediction is read from the device, and stopped and active ones are collected
piece by piece. It is here to be timed, and is tested to find what `friendly_pgd` finds. The batch comes back in another
order, the stopped ones first, and the labels with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparring import threat
from sparring.attacks.setting import quiet


def literal_pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    tau: int,
    noise: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(adversarial data, their labels, their natural data, back-propagations in all), stopped examples first."""
    stopped: list[tuple[Tensor, Tensor, Tensor]] = []
    here, natural, label = threat.random_start(x, eps=eps, start="uniform", generator=generator), x, y
    left = [tau] * len(x)
    backprops = 0
    with quiet(model):
        for _ in range(steps):
            point = here.detach().requires_grad_()
            logits = model(point)
            predicted = logits.detach().argmax(dim=1)
            going = []
            for index in range(len(label)):
                if predicted[index] != label[index]:
                    if left[index] == 0:
                        stopped.append((here[index : index + 1], label[index : index + 1], natural[index : index + 1]))
                        continue
                    left[index] -= 1
                going.append(index)
            if not going:
                here, label, natural = here[:0], label[:0], natural[:0]
                break
            nn.functional.cross_entropy(logits, label, reduction="sum").backward()  # type: ignore[no-untyped-call]
            assert point.grad is not None
            gradient = torch.cat([point.grad[index : index + 1] for index in going])
            here = torch.cat([here[index : index + 1] for index in going])
            natural = torch.cat([natural[index : index + 1] for index in going])
            label = torch.cat([label[index : index + 1] for index in going])
            left = [left[index] for index in going]
            here = here.detach() + step_size * gradient.sign()
            if noise:
                here = here + noise * torch.randn(here.shape, generator=generator, device=here.device)
            here = threat.project(here, natural, eps)
            backprops += len(going)
        model.zero_grad(set_to_none=True)
    parts = [*stopped, (here, label, natural)]
    x_adv, labels, origins = (torch.cat([part[which] for part in parts]) for which in range(3))
    return x_adv.detach(), labels, origins, backprops
