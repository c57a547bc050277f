"""The numbers that were tuned on one GPU, by the name of the device; a neutral default for every other.

Any of them is correct on any device; they decide speed alone. `of(device)` gives the set for a device. On a GPU that is
not in `TUNED`, counts of programs follow the number of processors, convolutions without a shortcut go to cuDNN, and
batches are not split. Does not import Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch


@dataclass(frozen=True)
class ConvTuning:
    """How conv.py cuts a convolution, by its number of 64x64 tiles. Pairs: stride 1, and back through stride 2."""

    large: tuple[int, int] = (792, 1000)  # more tiles than this: programs of 128x128
    medium: tuple[int, int] = (160, 448)  # at least as many: programs of 64x128,
    medium_shared: int = 264  # two of them to a long sum up to this many
    tall: int = 480  # at least as many: programs of 128x64, where they leave fewer processors idle:
    tall_resident: int = 396  # programs of 128x64 that run at once
    small_resident: int = 528  # programs of 64x64 that run at once
    shared_long: int = 256  # programs up to which sums of 36 rounds and more are shared
    shared_short: int = 160  # and sums of 18 rounds and more
    # cuDNN is faster from this many places on: (rounds of the sum, places), the first row whose rounds are reached.
    cudnn_forward: tuple[tuple[int, int], ...] = ((36, 512), (18, 20_000), (0, 100_000))
    cudnn_forward_strided: tuple[tuple[int, int], ...] = ((18, 384),)
    cudnn_back: tuple[tuple[int, int], ...] = ((36, 512),)
    cudnn_back_strided: tuple[tuple[int, int], ...] = ()

    def scaled(self, share: float) -> ConvTuning:
        """The same rule for a GPU of another number of processors. conv.py has 256 counters for shared sums."""

        def times(number: int) -> int:
            return max(1, round(number * share))

        return replace(
            self,
            large=(times(self.large[0]), times(self.large[1])),
            medium=(times(self.medium[0]), times(self.medium[1])),
            medium_shared=min(512, times(self.medium_shared)),
            tall=times(self.tall),
            tall_resident=times(self.tall_resident),
            small_resident=times(self.small_resident),
            shared_long=min(512, times(self.shared_long)),
            shared_short=min(512, times(self.shared_short)),
        )


@dataclass(frozen=True)
class BatchNormTuning:
    """How batch_norm.py cuts its sums."""

    channels: int = 32  # of a program that sums; 256 counters allow 256 times as many
    rows: int = 128  # in one round of it, forward
    rows_back: int = 32  # in one round of it, backward
    programs: int = 264  # that sum
    tile: int = 4096  # values of a program that sums nothing
    parts: int = 64  # parts of a sum read at once
    stages: int = 4  # rounds in flight


@dataclass(frozen=True)
class FirstLayerTuning:
    """How first_layer.py cuts the first layer."""

    places: int = 128  # of a program, forward
    pixels: int = 256  # of a program, backward
    large_from: int = 45_000  # places from which on a program takes 128 of them at once instead of 64


@dataclass(frozen=True)
class Fp8Cut:
    """How fp8_conv.py cuts a convolution into programs."""

    order: str  # of the sums: "places", "channels" (first), or "mixed"
    places: int  # of a program
    one: int  # its channels are one + two
    two: int
    inner: int  # channels of a round
    tail: int = 0  # channels of each tap that are left to rounds of their own
    stages: int = 4
    warps: int = 4


@dataclass(frozen=True)
class Tuning:
    """All numbers for one device."""

    processors: int
    conv: ConvTuning = ConvTuning()
    batch_norm: BatchNormTuning = BatchNormTuning()
    first_layer: FirstLayerTuning = FirstLayerTuning()
    cuts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # batch sizes that run as parts side by side
    # Convolutions in eight bits by (outer, inner) channels: (places, cut), the first row whose places are reached.
    fp8: Mapping[tuple[int, int], tuple[tuple[int, Fp8Cut], ...]] = field(default_factory=dict)
    bucket: int = 16  # a step of the attack is captured for multiples of this batch size, or of batch / 16


_ALWAYS = ((0, 0),)
# results/engine/fp8-conv-h200.json: the fastest of some forty cuts at 16, 40, 64 and 128 images.
_FP8_WRN_10 = {
    (160, 160): (
        (12_000, Fp8Cut("mixed", 128, 128, 32, 128, tail=32, stages=3)),
        (0, Fp8Cut("mixed", 64, 128, 32, 128, tail=32)),
    ),
    (320, 320): (
        (7_000, Fp8Cut("channels", 128, 256, 64, 64, warps=8)),
        (0, Fp8Cut("channels", 128, 64, 0, 64, stages=7)),
    ),
    (640, 640): (
        (4_225, Fp8Cut("channels", 128, 256, 64, 128, stages=3, warps=8)),
        (2_561, Fp8Cut("channels", 64, 256, 64, 128, warps=8)),
        (0, Fp8Cut("channels", 64, 128, 0, 128, stages=6)),
    ),
    # Stride 2, forward and back.
    (320, 160): (
        (9_000, Fp8Cut("channels", 128, 256, 64, 128, tail=32, warps=8)),
        (0, Fp8Cut("channels", 128, 64, 0, 128, tail=32)),
    ),
    (160, 320): ((0, Fp8Cut("mixed", 128, 128, 32, 64, stages=5)),),
    (640, 320): (
        (4_225, Fp8Cut("channels", 128, 256, 64, 64, stages=6, warps=8)),
        (0, Fp8Cut("channels", 64, 128, 0, 64, stages=6)),
    ),
    (320, 640): (
        (4_225, Fp8Cut("channels", 128, 256, 64, 128, warps=8)),
        (0, Fp8Cut("channels", 128, 64, 0, 128, stages=5)),
    ),
}
TUNED = {
    # ResNet-18 at 8 to 128 images and WRN-34-10 (results/engine/tuning-*-h200.json). Three programs of 128x64 or 64x128
    # fit into one of its processors, or four of 64x64. Cuts are those by which WRN-34-10 gained 2 % or more.
    "NVIDIA H200": Tuning(
        processors=132,
        fp8=_FP8_WRN_10,
        cuts={32: (16, 16), 56: (32, 24), 64: (32, 32), 80: (40, 40), 112: (96, 16), 128: (96, 32)},
    ),
}
_REFERENCE = TUNED["NVIDIA H200"]


def neutral(processors: int) -> Tuning:
    """Reasonable numbers for a GPU that nothing was tuned on."""
    conv = _REFERENCE.conv.scaled(processors / _REFERENCE.processors)
    conv = replace(
        conv,
        cudnn_forward=_ALWAYS,
        cudnn_forward_strided=_ALWAYS,
        cudnn_back=_ALWAYS,
        cudnn_back_strided=_ALWAYS,
    )
    return Tuning(processors, conv=conv, batch_norm=BatchNormTuning(programs=2 * processors, stages=2))


@cache
def of(device: torch.device) -> Tuning:
    """The numbers for a device. On a CPU, where Triton's interpreter tests the kernels, those of the H200."""
    if device.type != "cuda":
        return _REFERENCE
    properties = torch.cuda.get_device_properties(device)
    return TUNED.get(properties.name) or neutral(properties.multi_processor_count)
