"""SGD with momentum on tensors that stay in place, the learning rate among them, so that it can be captured.

The rule is torch's. Where the loss or a gradient is not finite, no weight and no momentum moves.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from sparring.engine.layout import like


def unsupported(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    """Why this module cannot take an optimiser's steps; empty where it can."""
    if type(optimizer) is not torch.optim.SGD:
        return f"{type(optimizer).__name__} is not captured"
    if len(optimizer.param_groups) > 1:
        return "an optimiser with several parameter groups is not captured"
    (group,) = optimizer.param_groups
    for name in ("nesterov", "maximize", "dampening"):
        if group[name]:
            return f"SGD with {name} is not captured"
    if {id(p) for p in model.parameters() if p.requires_grad} != {id(p) for p in group["params"] if p.requires_grad}:
        return "an optimiser of other parameters than the model's is not captured"
    return ""


class Sgd:
    """The step of an optimiser's `parameters` from gradients at `leaves`: the parameters, or bf16 copies of some.

    Momenta are kept in the optimiser, so that a checkpoint holds them.
    """

    def __init__(
        self,
        optimizer: torch.optim.SGD,
        parameters: list[Tensor],
        leaves: list[Tensor],
        *,
        kernels: ModuleType | None = None,
    ) -> None:
        """`kernels`: triton/sgd.py, where it can run."""
        group = optimizer.param_groups[0]
        self.momentum, self.weight_decay = float(group["momentum"]), float(group["weight_decay"])
        self.parameters, self.momenta = parameters, list[Tensor]()
        for parameter in parameters if self.momentum else ():
            # With its parameter's strides (a checkpoint's has others, under channels_last): the kernel reads both flat.
            # A momentum of zero gives torch's own first step: m * 0 + g.
            momentum = torch.zeros_like(parameter, requires_grad=False)
            before = optimizer.state[parameter].get("momentum_buffer")
            if before is not None:
                momentum.copy_(before)
            optimizer.state[parameter]["momentum_buffer"] = momentum
            self.momenta.append(momentum)
        self.copies = [
            leaf if leaf is not parameter else None for leaf, parameter in zip(leaves, parameters, strict=True)
        ]
        self.lr, self.skip, self.failed = (torch.zeros((), device=parameters[0].device) for _ in range(3))
        self.at_once = None
        if kernels is not None and all(parameter.dtype == torch.float32 for parameter in parameters):
            numbers = {"momentum": self.momentum, "weight_decay": self.weight_decay}
            self.at_once = kernels.DescendAll(parameters, self.momenta, self.copies, **numbers)

    @torch.no_grad()
    def __call__(self, loss: Tensor, gradients: list[Tensor]) -> None:
        """Take the step at the rate `lr`, copies included; or none, and `failed` is 1 from then on."""
        if self.at_once is not None:
            self.at_once(loss, gradients, self.lr, self.skip, self.failed)
            return
        pairs = zip(gradients, self.parameters, strict=True)
        gradients = [like(gradient, parameter, parameter.dtype) for gradient, parameter in pairs]
        self.skip.copy_(1.0 - finite(loss, gradients).float())
        torch._fused_sgd_(
            self.parameters,
            gradients,
            self.momenta,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=self.skip,
        )
        self.failed.copy_(torch.maximum(self.failed, self.skip))
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            if copy is not None:
                copy.copy_(parameter)

    def settle(self) -> None:
        """Finish, after a capture, what cannot be done inside one."""
        if self.at_once is not None:
            self.at_once.settle()


def finite(loss: Tensor, gradients: list[Tensor]) -> Tensor:
    """Whether both are finite, as a tensor."""
    return torch.isfinite(loss.detach() + torch.nn.utils.get_total_norm(gradients, foreach=True))
