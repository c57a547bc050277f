"""The model as an update runs it: the same layers around the same tensors, without a launch per layer for little.

Under autocast every weight is cast to bf16 in the forward and every gradient back, and so are the biases of linear
layers: in half precision the layers here have bf16 ones of their own, which whoever moves the model's weights writes on
the way. And batch-norm counts its batches layer by layer: here nobody does, and `count` adds up for all at once.
Batch-norm and what is around it are launched together, by our own kernels where they fit (fusing.py), else by torch's
compiler. Logits leave it in fp32, so that a loss is fp32 throughout. The model itself is left as it is.
"""

from __future__ import annotations

import copy
from types import ModuleType

import torch
from torch import Tensor, nn

from sparring.engine.update import fuse_bn
from sparring.engine.update.weight_gradients import Aside

# Convolutions from which on their weights' gradients are found aside. A graph of two branches takes longer to launch
# than one in a row: Small CNN's six do not bring that in (docs/performance.md).
_MANY = 12
_CAST = (nn.modules.conv._ConvNd, nn.Linear)  # autocast runs them in bf16
_Norm = nn.modules.batchnorm._BatchNorm


class WorkingCopy:
    """`module` is called in the model's place, and its gradient taken at `leaves` in place of `parameters`."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[Tensor],
        *,
        batch: int,
        half: bool,
        compiled: bool,
        kernels: tuple[ModuleType, ModuleType] | None = None,
        shape: tuple[int, ...] = (),
    ) -> None:
        """Made once for a model.

        Args:
            compiled: whether a forward of at least `batch` images is, where the kernels do not fit; one of fewer comes
                once in an epoch.
            kernels: norm.py and pooling.py, where they can run. They are tried before they are trusted.
            shape: of an image, to try them on.
        """
        cast = [layer.weight for layer in model.modules() if isinstance(layer, _CAST)]
        cast += [layer.bias for layer in model.modules() if isinstance(layer, nn.Linear) and layer.bias is not None]
        ids = {id(weight) for weight in cast if half and weight.dtype == torch.float32}
        self.weights = [parameter for parameter in parameters if id(parameter) in ids]
        self.copies: list[Tensor] = [nn.Parameter(weight.detach().to(torch.bfloat16)) for weight in self.weights]
        self.versions = [weight._version for weight in self.weights]
        own: dict[int, Tensor] = {id(weight): leaf for weight, leaf in zip(self.weights, self.copies, strict=True)}
        self.leaves = [own.get(id(parameter), parameter) for parameter in parameters]
        shared: dict[int, Tensor] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.module = copy.deepcopy(model, shared | own)
        self.pairs = list(zip(self.module.modules(), model.modules(), strict=True))
        self.counters: list[tuple[nn.Module, Tensor]] = []
        for layer in self.module.modules():
            # Without a momentum of its own a layer weighs by the count, and so keeps it.
            if isinstance(layer, _Norm) and layer.momentum is not None and layer.num_batches_tracked is not None:
                self.counters.append((layer, layer.num_batches_tracked))
                layer.num_batches_tracked = None
        self.forwards = 0
        self.aside = Aside(parameters[0].device)
        many = sum(isinstance(layer, nn.Conv2d) for layer in self.module.modules()) >= _MANY
        aside = self.aside if many else None
        self.fused = fuse_bn.fuse(self.module, *kernels, aside) if kernels is not None else None
        self.refused = False  # whether the kernels fit and fail on this device
        if self.fused is not None:
            probe = torch.rand((8, *shape), generator=torch.Generator().manual_seed(0)).to(parameters[0].device)
            with torch.autocast(probe.device.type, dtype=torch.bfloat16, enabled=half):
                self.refused = not fuse_bn.trusted(self.fused, self.module, probe)
            self.fused = None if self.refused else self.fused
        fast = plain = self.module.forward
        if self.fused is not None:
            fast = plain = self.fused.forward
        elif compiled:  # torch gives up compiling a forward after eight runs in one process
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            fast = torch.compile(plain, dynamic=False)

        def forward(x: Tensor) -> Tensor:
            self.forwards += 1
            out: Tensor = (fast if len(x) >= batch else plain)(x)
            # Autocast leaves cross entropy's log-softmax in the precision of the logits, on a GPU.
            return out.float() if half else out

        self.module.forward = forward

    def refresh(self) -> None:
        """Take over the modes of the model's layers, and its weights if anybody else has changed them in place.

        Torch counts such changes, a loaded checkpoint among them. A graph's are not counted: it writes the copies too.
        """
        for ours, theirs in self.pairs:
            if ours.training != theirs.training:
                ours.training = theirs.training
        versions = [weight._version for weight in self.weights]
        if versions != self.versions:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.weights)
            self.versions = versions

    def count(self) -> None:
        """Add the forwards since `forwards` was 0 to batch-norm's counts of batches."""
        counters = [counter for layer, counter in self.counters if layer.training]
        if counters:
            torch._foreach_add_(counters, self.forwards)
