"""An exponential average of a model's weights and statistics, moved after every update in few launches.

It starts at zero and keeps its own mass (the average of the number 1), so the first epochs are weighted correctly
without a warm-up to tune: what is read is average / mass. Its tensors have fixed places, and no Python number changes:
it can be captured.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of a model: `move` adds the model's present weights, `read` returns the averaged model."""

    def __init__(self, live: nn.Module, decay: float) -> None:
        self.live, self.decay = live, decay
        self.model = copy.deepcopy(live).eval().requires_grad_(False)
        self.followed = {
            name: tensor.detach()
            for name, tensor in (*live.named_parameters(), *live.named_buffers())
            if tensor.is_floating_point()
        }
        self.sums = {name: torch.zeros_like(tensor) for name, tensor in self.followed.items()}
        one = torch.ones((), device=next(iter(self.sums.values())).device)
        self.one, self.mass = one, torch.zeros_like(one)

    @torch.no_grad()
    def move(self) -> None:
        """Add the present weights: average <- decay * average + (1 - decay) * weights."""
        sums, present = [*self.sums.values(), self.mass], [*self.followed.values(), self.one]
        torch._foreach_lerp_(sums, present, 1 - self.decay)

    @torch.no_grad()
    def read(self) -> nn.Module:
        """The averaged model, up to date. Counters and other integers are the live model's."""
        self.model.load_state_dict(self.live.state_dict())
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, total in self.sums.items():  # a weight that two layers share has two names
            own[name].copy_(total / self.mass)
        return self.model

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps."""
        return self.sums | {"mass": self.mass}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the tensors of a checkpoint."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
