"""The oracle: PGD-K-tau as a literal loop over examples, one at a time, in the order of events of the paper.

It shares no code with the package. Randomness is drawn for the whole batch beforehand, in the order the package states:
the start, then one draw per step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def literal_friendly_pgd(model, x, y, *, eps, step_size, steps, tau, loss, start, noise, project, seed, norm="linf"):
    generator = torch.Generator().manual_seed(seed)
    if start == "uniform" and norm == "l2":
        drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        share = torch.rand(len(x), generator=generator, dtype=x.dtype)
        starts = x.clone()
        for i in range(len(x)):
            starts[i] += eps * share[i] ** (1 / x[i].numel()) * drawn[i] / drawn[i].pow(2).sum().sqrt()
    elif start == "uniform":
        starts = x + eps * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1)
    elif start == "normal":
        starts = x + 0.001 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    else:
        starts = x.clone()
    starts = starts.clamp(0, 1)
    if norm == "l2" and project and start is not None:
        starts = torch.stack([literal_shorten(point, natural, eps) for point, natural in zip(starts, x, strict=True)])
    elif project and start is not None:
        starts = torch.minimum(torch.maximum(starts, x - eps), x + eps).clamp(0, 1)
    kicks = [torch.randn(x.shape, generator=generator, dtype=x.dtype) if noise else None for _ in range(steps)]
    model.eval()
    results, counts = [], []
    for i in range(len(x)):
        natural, label = x[i : i + 1], y[i : i + 1]
        point, tau_left, taken = starts[i : i + 1].clone(), tau, 0
        for k in range(steps):
            at = point.clone().requires_grad_()
            logits = model(at)
            if logits.argmax(dim=1).item() != label.item():
                if tau_left == 0:
                    break
                tau_left -= 1
            (gradient,) = torch.autograd.grad(literal_loss(loss, model, natural, logits, label), at)
            if norm == "l2":
                length = float(gradient.pow(2).sum().sqrt())
                point = point + (step_size * gradient / length if length else 0.0)
            else:
                point = point + step_size * torch.sign(gradient)
            if noise:
                point = point + noise * kicks[k][i : i + 1]
            if project and norm == "l2":
                point = literal_shorten(point, natural, eps)
            elif project:
                point = torch.minimum(torch.maximum(point, natural - eps), natural + eps)
            point = point.clamp(0, 1)
            taken += 1
        results.append(point)
        counts.append(taken)
    return torch.cat(results), torch.tensor(counts)


def literal_shorten(point, natural, eps) -> Tensor:
    shift = point - natural
    length = float(shift.pow(2).sum().sqrt())
    return natural + shift * (eps / length) if length > eps else point


def literal_loss(loss, model, natural, logits, label) -> Tensor:
    c = int(label)
    if loss == "ce":
        return -torch.log_softmax(logits[0], dim=0)[c]
    if loss == "cw":
        others = [logits[0, k] for k in range(logits.shape[1]) if k != c]
        return torch.stack(others).max() - logits[0, c]
    if loss == "kl":
        with torch.no_grad():
            p = torch.softmax(model(natural)[0], dim=0)
        q = torch.softmax(logits[0], dim=0)
        return sum(p[k] * (torch.log(p[k]) - torch.log(q[k])) for k in range(len(p)))
    return loss(logits, label)[0]
