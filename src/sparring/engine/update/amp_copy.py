"""The model as an update runs it: the same layers on the same tensors, with fewer launches.

Under autocast every weight is cast to bf16 in the forward pass and every gradient back, and so are the biases of linear
layers: in half precision the layers here have bf16 copies of their own, which the optimiser writes as it moves the
model's weights. And batch-norm counts its batches layer by layer: here `count` adds to all counters at once. Batch-norm
and the operations around it are fused, by hand-written kernels where they fit (fuse_bn.py), else by torch.compile.
Logits leave it in fp32, so that a loss is fp32 throughout. The model itself stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from types import ModuleType

import torch
from torch import Tensor, nn

from sparring.engine.update import fuse_bn

_CAST = (nn.modules.conv._ConvNd, nn.Linear)  # autocast runs them in bf16
_Norm = nn.modules.batchnorm._BatchNorm


class AmpCopy:
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
        without: Collection[str] = (),
    ) -> None:
        """Made once for a model.

        Args:
            compiled: compile the forward pass of at least `batch` images, where the kernels do not fit; a smaller batch
                comes once in an epoch.
            kernels: batch_norm.py and pooling.py, where they can run. They are checked before they are trusted.
            shape: of an image, to check them on.
            without: hand-written parts to leave out: wide_channels, compile_ahead.
        """
        # Read from the table of parameters: the attribute may be computed, which can move a layer's buffers.
        cast = [layer._parameters.get("weight") for layer in model.modules() if isinstance(layer, _CAST)]
        cast += [layer._parameters.get("bias") for layer in model.modules() if isinstance(layer, nn.Linear)]
        ids = {id(weight) for weight in cast if half and weight is not None and weight.dtype == torch.float32}
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
            # A layer without momentum weighs by the count, and so keeps its counter.
            if isinstance(layer, _Norm) and layer.momentum is not None and layer.num_batches_tracked is not None:
                self.counters.append((layer, layer.num_batches_tracked))
                layer.num_batches_tracked = None
        self.forwards = 0
        device = parameters[0].device
        self.not_fused = ""  # the reason, where kernels are given and do not run this model
        self.fused: fuse_bn.Fused | None = None
        if kernels is not None:
            try:
                self.fused = fuse_bn.fuse(self.module, *kernels, widen="wide_channels" not in without)
            except fuse_bn.NotFused as error:
                self.not_fused = str(error)
        if self.fused is not None:
            probe = torch.rand((8, *shape), generator=torch.Generator().manual_seed(0)).to(device)
            with torch.autocast(probe.device.type, dtype=torch.bfloat16, enabled=half):
                ahead = "compile_ahead" not in without
                self.not_fused = fuse_bn.mismatch(self.fused, self.module, probe, compile_ahead=ahead)
            self.fused = None if self.not_fused else self.fused
        fast = plain = self.module.forward
        if self.fused is not None:
            fast = plain = self.fused.forward
        elif compiled:  # torch stops compiling a forward after eight engines in one process
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            fast = torch.compile(plain, dynamic=False)

        def forward(x: Tensor) -> Tensor:
            self.forwards += 1
            out: Tensor = (fast if len(x) >= batch else plain)(x)
            # Autocast leaves cross entropy's log-softmax in the precision of the logits, on a GPU.
            return out.float() if half else out

        self.module.forward = forward

    def refresh(self) -> bool:
        """Follow the modes of the model's layers, and its weights where they were changed in place from outside.

        Torch counts such changes, a loaded checkpoint among them. A graph's are not counted: it writes the copies too.
        Returns whether a mode has changed, so that what was captured is no longer the model.
        """
        changed = False
        for ours, theirs in self.pairs:
            if ours.training != theirs.training:
                ours.training, changed = theirs.training, True
        versions = [weight._version for weight in self.weights]
        if versions != self.versions:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.weights)
            self.versions = versions
        return changed

    def count(self) -> None:
        """Add the forwards since `forwards` was 0 to batch-norm's counts of batches."""
        counters = [counter for layer, counter in self.counters if layer.training]
        if counters:
            torch._foreach_add_(counters, self.forwards)
