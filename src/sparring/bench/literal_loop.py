"""PGD-K-tau as its authors' code runs it: a Python loop over the examples of the batch at every step.

None of their code is copied; what costs time is the same. Each example's prediction is read from the device on its own,
and so is its tau left, which is a tensor on the device too. The examples that go on are gathered by lists of indices.
The backward pass also computes the gradient of the weights, for every example that was still active, and its graph is
kept until the next step. The host draws the random numbers. The natural images go through the model once, whether or
not the loss needs it. The module exists to be timed; a test shows that it finds what `friendly_pgd` finds. The batch
comes back in another order, stopped examples first, and the labels with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparring.attacks import ball
from sparring.attacks.eval_mode import eval_mode


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
    """(adversarial data, their labels, their natural data, total back-propagations), stopped examples first.

    Args:
        generator: a CPU generator, on whichever device the images are.
    """
    stopped: list[tuple[Tensor, Tensor, Tensor]] = []
    here, natural, label = ball.random_start(x, eps=eps, start="uniform", generator=generator), x, y
    left = torch.full(y.shape, float(tau)).to(x.device)
    backprops = 0
    with eval_mode(model):
        clean = model(x)
        for _ in range(steps):
            point = here.detach().requires_grad_()
            logits = model(point)
            predicted = logits.argmax(dim=1, keepdim=True)
            going, done = [], []
            for index in range(len(label)):
                if predicted[index] != label[index]:
                    if left[index] == 0:
                        done.append(index)
                        continue
                    left[index] -= 1
                going.append(index)
            if done:
                stopped.append((point[done], label[done], natural[done]))
            model.zero_grad()
            nn.functional.cross_entropy(logits, label).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            assert point.grad is not None
            here, natural, label, left, clean = (t[going] for t in (here, natural, label, left, clean))
            if not going:
                break
            kick = noise * ball.draw_normal(here, generator)
            here = ball.project(here.detach() + step_size * point.grad[going].sign() + kick, natural, eps)
            backprops += len(going)
        model.zero_grad(set_to_none=True)
    parts = [*stopped, (here, label, natural)]
    x_adv, labels, origins = (torch.cat([part[which] for part in parts]) for which in range(3))
    return x_adv.detach(), labels, origins, backprops
