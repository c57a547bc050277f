"""The networks by name: one table, and `build`.

The name of a WRN of any depth and width is `wrn-D-W`; the table lists those of the paper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from sparring.errors import UserError, unknown
from sparring.models.normalize import Normalize
from sparring.models.resnet import ResNet18
from sparring.models.small_cnn import SmallCNN
from sparring.models.tiny_cnn import TinyCNN
from sparring.models.wide_resnet import WideResNet, blocks_per_stage


@dataclass(frozen=True)
class Architecture:
    """One row: a constructor from (num_classes, channels, size, normalize), the smallest image, a description."""

    make: Callable[[int, int, tuple[int, int], nn.Module], nn.Module]
    smallest: int  # pixels along the shorter side: on smaller images a pooling or stride would leave nothing
    about: str


def _wrn(depth: int, width: int, about: str) -> Architecture:
    n = blocks_per_stage(depth)
    return Architecture(
        lambda num_classes, channels, _size, normalize: WideResNet(
            n=n, width=width, num_classes=num_classes, channels=channels, normalize=normalize
        ),
        smallest=4,
        about=about,
    )


ARCHITECTURES = {
    "tiny_cnn": Architecture(
        lambda num_classes, channels, size, normalize: TinyCNN(
            num_classes=num_classes, channels=channels, size=size, normalize=normalize
        ),
        smallest=4,
        about="3 convolutions and a linear head for small images, 48 k parameters at 1x8x8",
    ),
    "small_cnn": Architecture(
        lambda num_classes, channels, size, normalize: SmallCNN(
            num_classes=num_classes, channels=channels, size=size, normalize=normalize
        ),
        smallest=8,
        about="the paper's Small CNN: 6 convolutions, 2 dense layers, 1.6 M parameters",
    ),
    "resnet18": Architecture(
        lambda num_classes, channels, _size, normalize: ResNet18(
            num_classes=num_classes, channels=channels, normalize=normalize
        ),
        smallest=8,
        about="ResNet-18 in its CIFAR form, 11.2 M parameters",
    ),
    "wrn-32-10": _wrn(32, 10, "wide ResNet of Table 1, 46.2 M parameters; the same function as wrn-34-10"),
    "wrn-34-10": _wrn(34, 10, "wide ResNet of Tables 2-4, 46.2 M parameters; the same function as wrn-32-10"),
    "wrn-58-10": _wrn(58, 10, "wide ResNet of Tables 2-4, 84.9 M parameters"),
    "wrn-40-4": _wrn(40, 4, "wide ResNet of App. C, 8.9 M parameters"),
}


def list_models() -> list[str]:
    """The names in the table. Any other `wrn-D-W` can be built, too."""
    return list(ARCHITECTURES)


def describe(name: str) -> str:
    """One line that describes a network."""
    return _find(name).about


def build(
    name: str,
    *,
    num_classes: int,
    channels: int = 3,
    size: tuple[int, int] = (32, 32),
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
) -> nn.Module:
    """Build a network from pixels in [0, 1], (N, channels, *size), to logits (N, num_classes).

    `normalize` is (mean, std) per channel, the network's first layer. Initial weights come from torch's global random
    state; under `torch.device("meta")` nothing is allocated.
    """
    architecture = _find(name)
    _require_int("num_classes", num_classes, least=2)
    _require_int("channels", channels, least=1)
    if len(size) != 2:
        raise UserError(f"size must be (height, width), got {size!r}. Write for example (32, 32).")
    height, width = size
    _require_int("the height of the images", height, least=1)
    _require_int("the width of the images", width, least=1)
    if min(height, width) < architecture.smallest:
        raise _too_small(name, architecture.smallest, height, width)
    return architecture.make(num_classes, channels, (height, width), _first_layer(normalize, channels))


def _find(name: str) -> Architecture:
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    wrn = re.fullmatch(r"wrn-([0-9]+)-([0-9]+)", name)
    if wrn is None:
        raise unknown("model", name, [*ARCHITECTURES, "wrn-D-W"])
    depth, width = int(wrn[1]), int(wrn[2])
    if width < 1:
        raise UserError(f"the width of a WRN must be at least 1, got {width} in {name!r}. Try 'wrn-{depth}-1'.")
    return _wrn(depth, width, f"wide ResNet, {blocks_per_stage(depth)} blocks per stage, {width} times as wide")


def _require_int(what: str, value: int, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{what} must be a whole number of at least {least}, got {value!r}.")


def _too_small(name: str, least: int, height: int, width: int) -> UserError:
    fitting = [other for other, row in ARCHITECTURES.items() if row.smallest <= min(height, width)]
    instead = f", or take {fitting[0]!r}" if fitting else ""
    return UserError(
        f"{name!r} needs images of at least {least}x{least}, got {height}x{width}. Enlarge the images{instead}."
    )


def _first_layer(normalize: tuple[Sequence[float], Sequence[float]] | None, channels: int) -> nn.Module:
    if normalize is None:
        return nn.Identity()  # adds no keys to the state_dict
    if len(normalize) != 2:
        raise UserError(f"normalize must be (mean, std), got {len(normalize)} values. Give two lists.")
    mean, std = normalize
    if len(mean) != channels:
        raise UserError(
            f"normalize must give {channels} means and stds, one per channel, got {len(mean)}. "
            "Repeat the number for each channel."
        )
    return Normalize(mean, std)
