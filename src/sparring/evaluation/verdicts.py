"""Verdicts: predictions in fp32 without TF32 (float64 for a float64 model), whatever precision gradients have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparring.attacks.checks import Model, call


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Full fp32 arithmetic without autocast; the caller's settings are restored afterwards."""
    with _full_precision(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _full_precision() -> Iterator[None]:
    backends: Any = torch.backends
    try:
        matmul, convolution = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # the caller uses torch's newer settings, and the two must not be mixed
        switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        before = [switch.fp32_precision for switch in switches]
        try:
            for switch in switches:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, was in zip(switches, before, strict=True):
                switch.fp32_precision = was
        return
    try:  # an exact setting is not written again: that would turn "inherit" into "ieee"
        if matmul != "highest":
            torch.set_float32_matmul_precision("highest")
        if convolution:
            backends.cudnn.allow_tf32 = False
        yield
    finally:
        if matmul != "highest":
            torch.set_float32_matmul_precision(matmul)
        if convolution:
            backends.cudnn.allow_tf32 = True


def allows_tf32(device: torch.device) -> bool:
    """Whether the caller's settings allow TF32 for fp32 arithmetic on this device."""
    backends: Any = torch.backends
    if device.type != "cuda":
        return False
    try:
        return bool(backends.cudnn.allow_tf32) or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # torch's newer settings
        return any(switch.fp32_precision != "ieee" for switch in (backends.cuda.matmul, backends.cudnn.conv))


@torch.no_grad()
def is_correct(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Whether the model is correct, one bool per example. NaN logits count as wrong."""
    with exact(x.device):
        logits = call(model, x)
    return (logits.argmax(dim=1) == y) & ~logits.isnan().any(dim=1)
