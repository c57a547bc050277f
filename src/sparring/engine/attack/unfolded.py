"""The model itself as the network of an attack, where it cannot be folded: eval mode, bf16 by autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Unfolded:
    """Calls the model in eval mode and leaves every layer in the mode it was in. Can be captured."""

    def __init__(self, model: nn.Module, *, half: bool) -> None:
        self.model, self.half = model, half
        self.modules = list(model.modules())

    def __call__(self, x: Tensor) -> Tensor:
        """Pixels to logits, in the precision of the pixels."""
        modes = [module.training for module in self.modules]
        for module in self.modules:
            module.training = False
        try:
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.half):
                out: Tensor = self.model(x)
        finally:
            for module, mode in zip(self.modules, modes, strict=True):
                module.training = mode
        return out.to(x.dtype)
