"""Which hand-written networks run in eight bits, and why the others do not."""

from __future__ import annotations

from torch import Tensor

from sparring.engine.manual import resnet_fp8, wide_resnet_fp8
from sparring.engine.manual.chain import ManualChain
from sparring.engine.manual.manual_network import ManualNetwork
from sparring.engine.manual.resnet_fp8 import Fp8ResNet
from sparring.engine.manual.wide_resnet import ManualWideResNet
from sparring.engine.manual.wide_resnet_fp8 import Fp8WideResNet
from sparring.engine.triton.available import fp8_for

Fp8Network = Fp8ResNet | Fp8WideResNet


def in_fp8(plain: ManualNetwork | None, x: Tensor) -> Fp8Network | str:
    """The hand-written network in eight bits, for images such as x; or why there is none."""
    if isinstance(plain, ManualChain):
        problem = resnet_fp8.unfit(plain)
    elif isinstance(plain, ManualWideResNet):
        problem = wide_resnet_fp8.unfit(plain)
    else:
        problem = "fp8 is for hand-written residual networks"
    if problem:
        return problem
    ops = fp8_for(x.device)
    if isinstance(ops, str):
        return ops
    network: Fp8Network
    if isinstance(plain, ManualChain):
        network = Fp8ResNet(plain, ops)
    else:
        assert isinstance(plain, ManualWideResNet)
        network = Fp8WideResNet(plain, ops)
    return network if network.takes(x) else "fp8 is for images of 8 to 64 pixels a side, a power of 2"
