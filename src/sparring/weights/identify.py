"""Identify the network that tensors belong to, by names and shapes: architecture, classes, channels, image size.

Knows the architectures of `sparring.models`; must not know files. Nothing is allocated: shapes come from torch's meta
device. Tensors do not tell the activation: a WRN with SiLU is taken for one with ReLU unless the caller names it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparring.errors import UserError
from sparring.models import build, keys, list_models
from sparring.models.keys import Shapes, shapes_of

Normalisation = tuple[Sequence[float], Sequence[float]]  # (mean, std), one number per channel in each
# Square sizes to try where only a dense layer reveals the image size, the common ones first.
SIZES = (32, 28, 8, 64, 224, 96, 16, *range(4, 257))


@dataclass(frozen=True)
class Identified:
    """An identified network: the arguments of `models.build`."""

    name: str
    num_classes: int = 10
    channels: int = 3
    size: tuple[int, int] = (32, 32)
    normalize: Normalisation | None = None

    def build(self) -> nn.Module:
        """Build the network on the meta device: names and shapes, no memory, no random numbers."""
        with torch.device("meta"):
            return build(
                self.name,
                num_classes=self.num_classes,
                channels=self.channels,
                size=self.size,
                normalize=self.normalize,
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of its state_dict."""
        if self.normalize is None:
            return dict(_shapes(self))
        return shapes_of(self.build().state_dict())

    def facts(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        normalize = None if self.normalize is None else [[float(v) for v in part] for part in self.normalize]
        return {
            "name": self.name,
            "num_classes": self.num_classes,
            "channels": self.channels,
            "size": list(self.size),
            "normalize": normalize,
        }


@functools.lru_cache(maxsize=512)
def _shapes(network: Identified) -> dict[str, tuple[int, ...]]:
    """Kept: a file of no known architecture is compared with all of them, several times."""
    return shapes_of(network.build().state_dict())


def name_of(tensors: Mapping[str, Tensor]) -> str | None:
    """The architecture that has exactly these keys, or None."""
    wide = _wide(tensors)
    names = [wide] if wide else [name for name in list_models() if not name.startswith("wrn-")]
    return next((name for name in names if _key_names(Identified(name).shapes()) == _key_names(tensors)), None)


def nearest(tensors: Mapping[str, Tensor]) -> tuple[str, float]:
    """The architecture with the most keys in common, and the share of keys in common."""
    keys, wide = _key_names(tensors), _wide(tensors)
    shares = {}
    for name in [*list_models(), *([wide] if wide else [])]:
        theirs = _key_names(Identified(name).shapes())
        shares[name] = len(keys & theirs) / len(keys | theirs)
    best = max(shares, key=lambda name: shares[name])
    return best, shares[best]


def read_off(
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    num_classes: int | None = None,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
) -> Identified:
    """The network of this architecture whose shapes match the tensors best.

    Classes come from the last layer, channels from the first, the size from a dense layer that depends on it, unless
    they are given.
    """
    modules = list(Identified(name).build().named_modules())
    stem = next(key for key, module in modules if isinstance(module, nn.Conv2d))
    head = [key for key, module in modules if isinstance(module, nn.Linear)][-1]
    first, last = tensors.get(f"{stem}.weight"), tensors.get(f"{head}.weight")
    if num_classes is None:
        num_classes = len(last) if last is not None and last.ndim == 2 and len(last) >= 2 else 10
    if channels is None:
        channels = first.shape[1] if first is not None and first.ndim == 4 and first.shape[1] else 3
    network = Identified(name, num_classes, channels)
    if size is not None:
        return replace(network, size=size)
    best, fewest = network, sum(1 for _ in _problems(tensors, network.shapes()))
    for side in SIZES:
        square = replace(network, size=(side, side))
        try:
            shapes = square.shapes()
        except UserError:  # too small for this architecture
            continue
        wrong = sum(1 for _ in _problems(tensors, shapes))
        if not wrong:
            return square
        if shapes == replace(network, size=(2 * side, 2 * side)).shapes():  # the mismatch is not the size
            break
        best, fewest = (square, wrong) if wrong < fewest else (best, fewest)
    return best


def fits(tensors: Mapping[str, Tensor], shapes: Shapes) -> bool:
    """Whether the tensors are exactly those of a network with these shapes."""
    return next(_problems(tensors, shapes), None) is None


def differences(tensors: Mapping[str, Tensor], shapes: Shapes) -> str:
    """The reasons why the tensors do not fit: 'missing: a, b, c and 7 more; unexpected: d.'"""
    return keys.in_words(_problems(tensors, shapes))


def advice(tensors: Mapping[str, Tensor]) -> str:
    """One sentence: the architecture of the tensors, or the nearest one."""
    name = name_of(tensors)
    if name is None:
        closest, share = nearest(tensors)
        return f"The nearest architecture is {closest!r}, with {share:.0%} of the keys in common."
    network = read_off(name, tensors)
    return f"The file looks like {name!r} for {network.num_classes} classes and {network.channels} channels."


def _problems(tensors: Mapping[str, Tensor], shapes: Shapes) -> Iterator[tuple[str, str]]:
    """(kind of problem, key) for each key that does not fit."""
    wanted, there = _key_names(shapes), _key_names(tensors)
    yield from keys.problems(
        {key: tensor for key, tensor in tensors.items() if key in there},
        {key: shape for key, shape in shapes.items() if key in wanted},
    )


def _key_names(keys: Mapping[str, object]) -> set[str]:
    """The keys that identify an architecture: old files lack batch counters, and any network may normalise."""
    return {key for key in keys if not key.endswith("num_batches_tracked") and not key.startswith("normalize.")}


def _wide(tensors: Mapping[str, Tensor]) -> str | None:
    """wrn-D-W, from the number of blocks in a stage and the channels of its first convolution."""
    blocks = {int(found[1]) for key in tensors if (found := re.match(r"block1\.layer\.([0-9]{1,2})\.", key))}
    first = tensors.get("block1.layer.0.conv1.weight")
    if not blocks or first is None or first.ndim != 4 or len(first) < 16 or len(first) % 16:
        return None
    return f"wrn-{6 * (max(blocks) + 1) + 4}-{len(first) // 16}"
