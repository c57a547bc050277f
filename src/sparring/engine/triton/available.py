"""Which Triton kernels can run on a device. Importing this module does not import Triton.

torch.compile traces through these functions: they must stay free of caches.
"""

from __future__ import annotations

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType | None:
    """The kernels of an attack step, where they can run."""
    if device.type != "cuda":
        return None
    try:
        from sparring.engine.triton import attack_step
    except ImportError:  # a torch without Triton
        return None
    return attack_step


def convolutions_for(device: torch.device) -> tuple[ModuleType, ModuleType, ModuleType] | None:
    """The layers of a hand-written network (conv.py, first_layer.py, pooling.py), where they can run."""
    if kernels_for(device) is None:
        return None
    from sparring.engine.triton import conv, first_layer, pooling

    return conv, first_layer, pooling


def pointwise_for(device: torch.device) -> ModuleType | None:
    """What lies between two convolutions (pointwise.py), where it can run."""
    if kernels_for(device) is None:
        return None
    from sparring.engine.triton import pointwise

    return pointwise


def norms_for(device: torch.device) -> tuple[ModuleType, ModuleType] | None:
    """Batch-norm and pooling for training (batch_norm.py, pooling.py), where they can run."""
    if kernels_for(device) is None:
        return None
    from sparring.engine.triton import batch_norm, pooling

    return batch_norm, pooling


def descent_for(device: torch.device) -> ModuleType | None:
    """SGD in two launches (sgd.py), where it can run."""
    if kernels_for(device) is None:
        return None
    from sparring.engine.triton import sgd

    return sgd


def fp8_for(device: torch.device) -> ModuleType | str:
    """Convolutions in eight bits (fp8_conv.py); or why they cannot run."""
    if device.type != "cuda":
        return "fp8 needs a GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "fp8 needs a GPU of compute capability 9.0 or more"
    try:
        from sparring.engine.triton import fp8_conv
    except ImportError:  # a torch without Triton, or an older Triton
        return "fp8 needs a Triton with tensor descriptors"
    return fp8_conv
