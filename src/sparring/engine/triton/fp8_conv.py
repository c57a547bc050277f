"""3x3 convolutions in eight bits as Triton kernels, with what lies between two of them in the same launch.

Activations and weights are e4m3, gradients of the output e5m2, sums fp32. A kernel of the forward pass adds the
shortcut, applies the next layer's batch-norm or the bias, and ReLU, and rounds to e4m3; one of the backward pass
multiplies by the batch-norm's scale, masks, adds the shortcut's gradient and rounds to e5m2. No tensor is read only to
be rounded. manual/fp8_simulated.py has the same functions in torch's operations.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparring.engine.triton import fp8_kernels, tuning
from sparring.engine.triton.compile_ahead import launch
from sparring.engine.triton.fp8_kernels import RELU, RELU_BACK, SUM, SUM_BACK, SUM_RELU, SUM_RELU_BACK
from sparring.engine.triton.tuning import Fp8Cut

_BLOCK = 1024


def conv_relu(x: Tensor, weight: Tensor, numbers: Tensor, shift: Tensor, *, stride: int) -> Tensor:
    """u * relu(f * conv(x) + shift) in e4m3.

    Args:
        x: (images, lines, columns, inner) in e4m3.
        weight: (outer, 9 * inner) in e4m3.
        numbers: f and u.
    """
    out = _image(x, weight, x.shape[1] // stride, x.dtype)
    _launch(RELU, x, weight, out, numbers, stride, None, shift=shift)
    return out


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
    """f * conv(x) + `added`, in bf16 where it is `kept`, and u * relu(scale * that + shift) in `dtype`.

    `shortcut` is the input of a 1x1 convolution with stride 2 that is added; its weights are the last columns.
    """
    out = _image(x, weight, x.shape[1], dtype)
    total = torch.empty_like(out, dtype=torch.bfloat16) if kept else None
    more = {"added": added, "total": total, "scale": scale, "shift": shift}
    _launch(SUM, x, weight, out, numbers, 1, shortcut, **more)
    return total, out


def conv_back_relu(
    g: Tensor, weight: Tensor, numbers: Tensor, seen: Tensor, *, among: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The gradient at a convolution's input where `seen`, or seen[among], is positive, in `dtype`.

    Args:
        g: (images, lines, columns, inner) in e5m2: the gradient at the output.
        weight: (outer, 9 * inner) in e4m3.
        numbers: the third is f.
        seen: (any, lines, columns, outer) in e4m3.
    """
    out = _image(g, weight, g.shape[1], dtype)
    _launch(RELU_BACK, g, weight, out, numbers, 1, None, seen=seen, among=among)
    return out


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
    """The same through a convolution [and a shortcut] with this stride, times scale, plus `added`: in bf16 and e5m2."""
    out = _image(g, weight, g.shape[1] * stride, g.dtype)
    total = torch.empty_like(out, dtype=torch.bfloat16)
    more = {"seen": seen, "among": among, "added": added, "total": total, "scale": scale}
    _launch(SUM_BACK, g, weight, out, numbers, stride, shortcut, **more)
    return total, out


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
    """relu(f * conv(x) + shift + `added`), in bf16 where it is `kept`, and u times that in `dtype`.

    `shortcut` is as in `conv_sum`.
    """
    out = _image(x, weight, x.shape[1], dtype)
    total = torch.empty_like(out, dtype=torch.bfloat16) if kept else None
    _launch(SUM_RELU, x, weight, out, numbers, 1, shortcut, added=added, total=total, shift=shift)
    return total, out


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
    """The gradient at what a convolution [and a shortcut] with this stride read, plus `added`; 0 where `seen` is.

    In bf16 and e5m2; the arguments are those of `conv_back_sum`.
    """
    out = _image(g, weight, g.shape[1] * stride, g.dtype)
    total = torch.empty_like(out, dtype=torch.bfloat16)
    more = {"seen": seen, "among": among, "added": added, "total": total}
    _launch(SUM_RELU_BACK, g, weight, out, numbers, stride, shortcut, **more)
    return total, out


def rounded(x: Tensor, numbers: Tensor) -> Tensor:
    """u * x in e4m3."""
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    launch(fp8_kernels.round_numbers, (triton.cdiv(x.numel(), _BLOCK),), x, numbers, out, x.numel(), _BLOCK)
    return out


def first_back(
    gradient: Tensor, weight: Tensor, o: Tensor, scale: Tensor, *, among: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient at the sum that relu(norm(.)) and pooling read, in bf16 and e5m2, divided by a size per image.

    Args:
        gradient: (any, classes), at the logits.
        weight: (classes, channels), of the linear layer.
        o: (any, lines, columns, channels): what is pooled.
        scale: (channels,), of the batch-norm.
        among: in int32, the rows of gradient and o.
    """
    images = len(o) if among is None else len(among)
    classes, channels = weight.shape
    area = o.shape[1] * o.shape[2]
    total = torch.empty((images, *o.shape[1:]), dtype=torch.bfloat16, device=o.device)
    out, size = torch.empty_like(total, dtype=torch.float8_e5m2), o.new_empty(images, dtype=torch.float32)
    chosen = gradient if among is None else among
    wide = triton.next_power_of_2(channels)
    places = max(1, min(triton.next_power_of_2(area), 8192 // wide))
    launch(
        fp8_kernels.first_back,
        (images, triton.cdiv(area, places)),
        *(gradient, weight, o, scale, chosen, total, out, size, area, channels, classes),
        *(among is not None, places, wide, triton.next_power_of_2(classes)),
        num_warps=8,
    )
    return total, out, size


def round_weights(weight: Tensor, ahead: Tensor, back: Tensor, numbers: Tensor) -> None:
    """Round weights into columns of what the two passes read.

    Args:
        weight: (outer, taps, inner).
        ahead: (outer, taps * inner).
        back: (inner, taps * outer).
        numbers: the fourth and fifth are their factors.
    """
    outer, taps, inner = weight.shape
    grid = (triton.cdiv(outer, 32), triton.cdiv(inner, 32), taps)
    strides = ahead.stride(0), back.stride(0)
    launch(fp8_kernels.weights, grid, weight, ahead, back, numbers, outer, inner, *strides, 32, 32)


def _image(x: Tensor, weight: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """Room for a result with this many lines."""
    columns = x.shape[2] * side // x.shape[1]
    return torch.empty((len(x), side, columns, len(weight)), dtype=dtype, device=x.device)


def cut_of(x: Tensor, outer: int, places: int) -> Fp8Cut:
    """How to cut a convolution of x into this many channels at this many places (tuning.py has the numbers)."""
    inner = x.shape[3]
    for least, cut in tuning.of(x.device).fp8.get((outer, inner), ()):
        if places >= least:
            return cut
    return Fp8Cut("channels", 128, 64, 0, next(wide for wide in (128, 64, 32) if inner % wide == 0))


def _launch(
    kind: int,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    numbers: Tensor,
    stride: int,
    shortcut: Tensor | None,
    *,
    added: Tensor | None = None,
    total: Tensor | None = None,
    seen: Tensor | None = None,
    among: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> None:
    images, height, width, inner = x.shape
    outer, back = len(weight), kind in (RELU_BACK, SUM_BACK, SUM_RELU_BACK)
    if stride == 2 and not back:
        height, width = height // 2, width // 2
    cut = cut_of(x, outer, images * height * width)
    lines = min(height, max(1, cut.places // width))
    many = max(1, cut.places // (width * lines))
    channels = 0 if shortcut is None else shortcut.shape[3]
    short = 64 if channels % 64 == 0 and channels else 32

    def boxes(image: Tensor, inside: int, pairs: bool) -> TensorDescriptor:
        if not pairs:
            return TensorDescriptor.from_tensor(image, [many, lines, width, inside])
        view = image.view(images, height, 2, width, 2 * image.shape[3])
        return TensorDescriptor.from_tensor(view, [many, lines, 1, width, inside])

    def operands(image: Tensor, inside: int, pairs: bool) -> tuple[TensorDescriptor, ...]:
        rows = (cut.one, cut.two or cut.one)
        of_weight = (TensorDescriptor.from_tensor(weight, [row, inside]) for row in rows)
        return (boxes(image, inside, pairs), *of_weight)

    main = operands(x, cut.inner, stride == 2 and not back)
    tail = operands(x, cut.tail, stride == 2 and not back) if cut.tail else main
    beside = main if shortcut is None else operands(shortcut, short, not back)
    # What is absent is neither read nor written; its type is that of what else could stand there.
    half = next(tensor for tensor in (scale, shift, total, out) if tensor is not None)
    tensors = [half if tensor is None else tensor for tensor in (total, added)]
    tensors += [(numbers if seen is None else seen).view(torch.int8)]
    tensors += [numbers.view(torch.int32) if among is None else among]
    tensors += [numbers if tensor is None else tensor for tensor in (scale, shift)]
    tiles = triton.cdiv(images, many) * (height // lines) * triton.cdiv(outer, cut.one + cut.two)
    span = -2 if stride == 2 and back else stride
    launch(
        fp8_kernels.conv,
        (tiles * (4 if span < 0 else 1),),
        *(*main, *tail, *beside, out, *tensors, numbers),
        *(images, int(added is not None), int(total is not None), int(among is not None)),
        H=height,
        W=width,
        C=inner,
        CS=channels,
        N=outer,
        TI=many,
        TH=lines,
        N1=cut.one,
        N2=cut.two,
        BK=cut.inner,
        TAIL=cut.tail,
        BS=short,
        KIND=kind,
        ORDER=("places", "channels", "mixed").index(cut.order),
        SPAN=span,
        STAGES=cut.stages,
        num_warps=cut.warps,
    )
