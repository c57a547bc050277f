"""Which network an attack on a CPU takes its gradients from, and why. `select.prepare` asks.

The folded network in two hand-written passes, in bf16 where the run asks for it and the CPU multiplies bf16 numbers
(AMX or AVX512-BF16: elsewhere they are slower than fp32), else in the model's precision; the model itself where it
cannot be folded. The choice depends on the CPU and the network and on no clock, so that two runs of one seed are the
same. Updates are the plain engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparring.attacks.checks import TwoPasses
from sparring.engine.attack.cpu_passes import CPUPasses
from sparring.engine.attack.folded import NotFolded, fold, mismatch
from sparring.engine.cuda_graphs import reason


@dataclass(frozen=True)
class CPUAttack:
    """One path of the attack."""

    network: CPUPasses | None  # None: the model itself
    how: str


def attack_for(model: nn.Module, images: Tensor, *, half: bool) -> CPUAttack:
    """The network for attacks on a CPU, checked on a few images."""
    dtype = next(model.parameters()).dtype
    try:
        exact = fold(model, dtype=dtype, fused=False)
        if problem := mismatch(exact, model, images):
            return CPUAttack(None, f"the model itself ({problem})")
        native = bf16_unit() if half and dtype == torch.float32 else ""
        network = CPUPasses(exact if not native else fold(model, dtype=torch.bfloat16, fused=False))
        if problem := _differs(network, images.to(dtype)):
            return CPUAttack(None, f"the model itself ({problem})")
    except NotFolded as error:
        return CPUAttack(None, f"the model itself ({error})")
    how = f"bf16 (this CPU has {native}), batch-norm folded" if native else "batch-norm folded"
    return CPUAttack(network, how)


def bf16_unit() -> str:
    """The CPU's instructions for products of bf16 numbers; empty where it has none."""
    for name, asks in (("AMX", "_is_amx_tile_supported"), ("AVX512-BF16", "_is_avx512_bf16_supported")):
        if getattr(torch.cpu, asks, lambda: False)():
            return name
    return ""


def _differs(network: TwoPasses, x: Tensor) -> str:
    """Why the two passes are not the folded network with autograd; empty where they are, rounding apart."""
    try:
        point = x.clone().requires_grad_()
        with torch.enable_grad():
            expected = network(point)
            (of_x,) = torch.autograd.grad(expected.square().sum(), point)
        logits, back = network.forward_back(x)
        found = back(2 * logits, None)
        some = torch.arange(0, len(x), 2, device=x.device)
        parts = back(2 * logits[some], some)
    except Exception as error:  # an operation that the passes cannot differentiate alone
        return f"its passes fail ({reason(error)})"
    size, slack = float(of_x.abs().max()), 0.05 if of_x.dtype == torch.float32 else 1e-6
    near = all(
        float((ours - theirs).abs().max()) <= slack * size for ours, theirs in ((found, of_x), (parts, of_x[some]))
    )
    return "" if near else "its passes differ from autograd"
