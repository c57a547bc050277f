"""What triton/fp8_conv.py does, in torch's operations: eight-bit numbers are rounded, sums are fp32.

The kernels are tested against this, and on a GPU a network in eight bits is checked against it before it is trusted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in this precision; those beyond its largest become its largest."""
    most = LARGEST.get(dtype)
    return (value if most is None else value.clamp(-most, most)).to(dtype)


def conv_relu(x: Tensor, weight: Tensor, numbers: Tensor, shift: Tensor, *, stride: int) -> Tensor:
    """As in fp8_conv, and so are the others."""
    value = _conv(x, weight, stride) * numbers[0] + shift.float()
    return to(value.clamp(min=0) * numbers[1], x.dtype)


def conv_sum(
    x: Tensor,
    weight: Tensor,
    numbers: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    added: Tensor | None = None,
    shortcut: Tensor | None = None,
    kept: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    """A convolution, a sum, a batch-norm and a ReLU."""
    value = _conv_and_shortcut(x, weight, shortcut) * numbers[0]
    total = (value if added is None else value + added.float()).bfloat16()
    o = (total.float() * scale.float() + shift.float()).clamp(min=0) * numbers[1]
    return total if kept else None, to(o, dtype)


def conv_back_relu(
    g: Tensor, weight: Tensor, numbers: Tensor, seen: Tensor, *, among: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Back through a convolution and the ReLU before it."""
    return to(torch.where(_positive(seen, among), _back(g, weight, 1) * numbers[2], 0), dtype)


def conv_back_sum(
    g: Tensor,
    weight: Tensor,
    numbers: Tensor,
    seen: Tensor,
    scale: Tensor,
    *,
    among: Tensor | None,
    stride: int,
    added: Tensor | None = None,
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Back through a convolution, the ReLU and the batch-norm before it, and a sum."""
    value = _back_and_shortcut(g, weight, stride, shortcut)
    value = torch.where(_positive(seen, among), value * numbers[2], 0) * scale.float()
    total = (value if added is None else value + added.float()).bfloat16()
    return total, to(total.float(), g.dtype)


def conv_sum_relu(
    x: Tensor,
    weight: Tensor,
    numbers: Tensor,
    shift: Tensor,
    *,
    added: Tensor | None = None,
    shortcut: Tensor | None = None,
    kept: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    """A convolution, a sum and a ReLU."""
    value = _conv_and_shortcut(x, weight, shortcut) * numbers[0] + shift.float()
    total = (value if added is None else value + added.float()).clamp(min=0).bfloat16()
    return total if kept else None, to(total.float() * numbers[1], dtype)


def conv_back_sum_relu(
    g: Tensor,
    weight: Tensor,
    numbers: Tensor,
    seen: Tensor,
    *,
    among: Tensor | None,
    stride: int,
    added: Tensor | None = None,
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Back through a convolution, a sum and the ReLU behind it."""
    value = _back_and_shortcut(g, weight, stride, shortcut) * numbers[2]
    value = value if added is None else value + added.float()
    total = torch.where(_positive(seen, among), value, 0).bfloat16()
    return total, to(total.float(), g.dtype)


def rounded(x: Tensor, numbers: Tensor) -> Tensor:
    """Scale and round."""
    return to(x.float() * numbers[1], torch.float8_e4m3fn)


def first_back(
    gradient: Tensor, weight: Tensor, o: Tensor, scale: Tensor, *, among: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Back through the linear layer, pooling, a ReLU and a batch-norm."""
    if among is not None:
        gradient, o = gradient[among], o[among]
    flat = gradient.float() @ weight.float() / (o.shape[1] * o.shape[2])
    size = flat.abs().amax(1).clamp(min=1e-30)
    flat = flat / size[:, None] * scale.float()
    value = torch.where(o > 0, flat[:, None, None, :], 0)
    return value.bfloat16(), to(value, torch.float8_e5m2), size


def round_weights(weight: Tensor, ahead: Tensor, back: Tensor, numbers: Tensor) -> None:
    """Round weights for both passes, in place."""
    wide = weight.float()
    ahead.copy_(to(wide * numbers[3], ahead.dtype).flatten(1))
    back.copy_(to(wide.permute(2, 1, 0) * numbers[4], back.dtype).flatten(1))


def _planes(x: Tensor) -> Tensor:
    return x.float().permute(0, 3, 1, 2)


def _filters(x: Tensor, weight: Tensor) -> Tensor:
    """(outer, inner, 3, 3)."""
    return weight[:, : 9 * x.shape[3]].float().reshape(len(weight), 3, 3, -1).permute(0, 3, 1, 2)


def _short(x: Tensor, weight: Tensor) -> Tensor:
    """(outer, inner, 1, 1): the columns behind those for x."""
    return weight[:, 9 * x.shape[3] :].float()[:, :, None, None]


def _conv(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return F.conv2d(_planes(x), _filters(x, weight), padding=1, stride=stride).permute(0, 2, 3, 1)


def _conv_and_shortcut(x: Tensor, weight: Tensor, shortcut: Tensor | None) -> Tensor:
    value = _conv(x, weight, 1)
    if shortcut is None:
        return value
    return value + F.conv2d(_planes(shortcut), _short(x, weight), stride=2).permute(0, 2, 3, 1)


def _back(g: Tensor, weight: Tensor, stride: int) -> Tensor:
    filters = _filters(g, weight).transpose(0, 1)
    of_x = F.conv_transpose2d(_planes(g), filters, padding=1, stride=stride, output_padding=stride - 1)
    return of_x.permute(0, 2, 3, 1)


def _back_and_shortcut(g: Tensor, weight: Tensor, stride: int, shortcut: Tensor | None) -> Tensor:
    value = _back(g, weight, stride)
    if shortcut is None:
        return value
    back = _short(g, weight).transpose(0, 1)
    return value + F.conv_transpose2d(_planes(shortcut), back, stride=2, output_padding=1).permute(0, 2, 3, 1)


def _positive(seen: Tensor, among: Tensor | None) -> Tensor:
    return (seen if among is None else seen[among]).float() > 0
