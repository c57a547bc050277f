"""The step of an optimiser on tensors that stay in place, the learning rate among them, so that it can be captured.

It serves SGD, Adam and AdamW, with several parameter groups. Where the loss or a gradient is not finite, no weight and
no state of the optimiser moves.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from sparring.engine.layout import like
from sparring.engine.update.adam import Adam
from sparring.engine.update.norm import checked, ratios
from sparring.engine.update.sgd import Sgd

_RULES: dict[type[torch.optim.Optimizer], type[Sgd] | type[Adam]] = {
    torch.optim.SGD: Sgd,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
}


def unsupported(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    """Why `Descent` cannot take an optimiser's steps; empty where it can."""
    rule = _RULES.get(type(optimizer))
    if rule is None:
        return f"{type(optimizer).__name__} is not captured"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{type(optimizer).__name__} with hooks is not captured"
    own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if {id(p) for p in model.parameters() if p.requires_grad} != {id(p) for p in own}:
        return "an optimiser of other parameters than the model's is not captured"
    return next((why for group in optimizer.param_groups if (why := rule.unsupported(group))), "")


class Descent:
    """The step of an optimiser's `parameters` from gradients at `leaves`: the parameters, or bf16 copies of some."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[Tensor],
        leaves: list[Tensor],
        *,
        kernels: ModuleType | None = None,
        clip: float = 0.0,
    ) -> None:
        """Made once for a run.

        Args:
            kernels: triton/sgd.py, where it can run. It takes plain SGD of one group, without clipping.
            clip: the largest global norm of a gradient; a longer one is scaled down. 0 for none.
        """
        self.parameters, self.clip = parameters, clip
        self.copies = [
            leaf if leaf is not parameter else None for leaf, parameter in zip(leaves, parameters, strict=True)
        ]
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        rule = _RULES[type(optimizer)]
        self.groups: list[tuple[Sgd | Adam, list[int], float]] = []  # a rule, its parameters' places, its relative rate
        for group, ratio in zip(optimizer.param_groups, ratios(optimizer), strict=True):
            places = [place[id(parameter)] for parameter in group["params"] if id(parameter) in place]
            if places:
                self.groups.append((rule(optimizer, group, [parameters[index] for index in places]), places, ratio))
        self.state = [tensor for each, *_ in self.groups for tensor in each.state]
        self.lr, self.skip, self.failed = (torch.zeros((), device=parameters[0].device) for _ in range(3))
        first, places, ratio = self.groups[0]
        self.at_once = None
        plain = len(self.groups) == 1 and isinstance(first, Sgd) and not first.nesterov and not clip
        plain = plain and ratio == 1.0  # else the groups before it are frozen, and the schedule is theirs
        if kernels is not None and plain and all(parameter.dtype == torch.float32 for parameter in parameters):
            assert isinstance(first, Sgd)
            numbers = {"momentum": first.momentum, "weight_decay": first.weight_decay}
            self.order = places  # an optimiser may have the parameters in another order than the model
            copies = [self.copies[index] for index in places]
            self.at_once = kernels.DescendAll(first.parameters, first.state, copies, **numbers)

    @torch.no_grad()
    def __call__(self, loss: Tensor, gradients: list[Tensor]) -> None:
        """Take the step at the rate `lr`, copies included; or none, and `failed` is 1 from then on."""
        if self.at_once is not None:
            self.at_once(loss, [gradients[index] for index in self.order], self.lr, self.skip, self.failed)
            return
        pairs = zip(gradients, self.parameters, strict=True)
        gradients = [like(gradient, parameter, parameter.dtype) for gradient, parameter in pairs]
        finite, gradients = checked(loss, gradients, self.clip)
        self.skip.copy_(1.0 - finite.float())
        for rule, places, ratio in self.groups:
            rule([gradients[index] for index in places], self.lr if ratio == 1.0 else self.lr * ratio, self.skip)
        self.failed.copy_(torch.maximum(self.failed, self.skip))
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            if copy is not None:
                copy.copy_(parameter)

    def settle(self) -> None:
        """Finish, after a capture, what cannot be done inside one."""
        if self.at_once is not None:
            self.at_once.settle()
