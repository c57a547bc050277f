"""The nearest point of a hyperplane inside [0, 1], in the L-infinity norm: FAB asks for it twice a step (fab.py).

pyautoattack sorts every pixel for it. But how near one comes to the hyperplane grows with the largest change of a pixel
along straight pieces, so Newton's method from below ends exactly, after a few rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 100  # rounds; it ends by itself
_ON_GPU, _ON_CPU = 3, 1  # rounds between two looks at whether it has ended; on a GPU a look waits
_GROWS = 1 + 1e-6  # below this, a change is rounding


def steps_to_hyperplane(points: Tensor, normals: Tensor, offsets: Tensor) -> Tensor:
    """The smallest steps, by their largest number, after which normals * (points + step) = offsets.

    Where the hyperplane misses the box, the steps lead to the corner that is nearest to it; so they do, as in
    pyautoattack, where numbers are NaN or infinite.

    Args:
        points: (..., n, pixels), in [0, 1].
        normals: (n, pixels), those of all leading places of `points`.
        offsets: (n,).
    """
    away = (normals * points).sum(-1, keepdim=True) - offsets[..., None]
    up = torch.where(away >= 0, normals < 0, normals > 0)  # pixels that grow
    room, weight, need = torch.where(up, 1 - points, points), normals.abs(), away.abs()
    largest = need / weight.sum(-1, keepdim=True).clamp(min=1e-30)  # if no pixel met the end of its room
    look = _ON_GPU if points.is_cuda else _ON_CPU
    for number in range(1, _MOST + 1):
        free = weight * (room > largest)
        slope = free.sum(-1, keepdim=True)
        done = ((weight - free) * room).sum(-1, keepdim=True)
        found = torch.where(slope > 0, (need - done) / slope, torch.inf)
        if number % look == 0 and not bool((found > largest * _GROWS).any()):
            break
        largest = torch.maximum(largest, found)
    reached = largest.isfinite() & weight.isfinite().all(-1, keepdim=True)
    step = torch.where(reached, torch.minimum(largest, room), room)
    return torch.where(up, step, -step) * (normals != 0)
