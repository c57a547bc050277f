"""The networks by name: one table of those built in, `register_model` for others, and `build`.

The name of a WRN of any depth and width is `wrn-D-W`, with SiLU in place of ReLU `wrn-D-W-silu`; the table lists those
of the paper and the common ones. Other kinds of names: `own.py`, `timm_networks.py`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from sparring.errors import UserError, unknown
from sparring.files.regular import shown
from sparring.models import own
from sparring.models.normalize import Normalize
from sparring.models.preact_resnet import PreActResNet18
from sparring.models.resnet import ResNet18
from sparring.models.small_cnn import SmallCNN
from sparring.models.timm_networks import TIMM, build_timm
from sparring.models.tiny_cnn import TinyCNN
from sparring.models.wide_resnet import WideResNet, blocks_per_stage


@dataclass(frozen=True)
class Architecture:
    """One row: a constructor from (num_classes, channels, size, normalize), the smallest image, a description."""

    make: Callable[[int, int, tuple[int, int], nn.Module], nn.Module]
    smallest: int  # pixels along the shorter side: on smaller images a pooling or stride would leave nothing
    about: str


def _wrn(depth: int, width: int, about: str, *, silu: bool = False) -> Architecture:
    n = blocks_per_stage(depth)
    activation = F.silu if silu else F.relu
    return Architecture(
        lambda num_classes, channels, _size, normalize: WideResNet(
            n=n, width=width, num_classes=num_classes, channels=channels, normalize=normalize, activation=activation
        ),
        smallest=4,
        about=about,
    )


_WRN = re.compile(r"wrn-([0-9]{1,9})-([0-9]{1,9})(-silu)?")
# Of a WRN by name, which a file can record: the deepest residual network published has 1,001 layers, the widest WRN 20.
_DEEPEST, _WIDEST = 1_002, 64
_MOST, _LARGEST_SIDE = 2**20, 2**14  # classes or channels; pixels: a file can record any number, and torch's overflow
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
    "preact_resnet18": Architecture(
        lambda num_classes, channels, _size, normalize: PreActResNet18(
            num_classes=num_classes, channels=channels, normalize=normalize
        ),
        smallest=8,
        about="PreActResNet-18 as adversarial training uses it, 11.2 M parameters",
    ),
    "wrn-28-10-silu": _wrn(28, 10, "wide ResNet with SiLU in place of ReLU, 36.5 M parameters", silu=True),
    "wrn-32-10": _wrn(32, 10, "wide ResNet of Table 1, 46.2 M parameters; the same function as wrn-34-10"),
    "wrn-34-10": _wrn(34, 10, "wide ResNet of Tables 2-4, 46.2 M parameters; the same function as wrn-32-10"),
    "wrn-58-10": _wrn(58, 10, "wide ResNet of Tables 2-4, 84.9 M parameters"),
    "wrn-40-4": _wrn(40, 4, "wide ResNet of App. C, 8.9 M parameters"),
}


def list_models() -> list[str]:
    """The names in the table. Any other `wrn-D-W` and `wrn-D-W-silu` can be built, too."""
    return list(ARCHITECTURES)


def describe(name: str) -> str:
    """One line that describes a network. No import path is followed."""
    if name in own.MADE or own.is_import_path(name):
        return f"the network that {name} makes"
    return f"timm's {name.removeprefix(TIMM)}" if name.startswith(TIMM) else _find(name).about


def built_in(name: str) -> bool:
    """Whether a network of this name is part of the package, whatever else this process has registered."""
    return name in ARCHITECTURES or _WRN.fullmatch(name) is not None


def register_model(name: str, make: own.Make, *, overwrite: bool = False) -> None:
    """Give a network of the caller's own a name for this process: `--model NAME`, `Config(model=NAME)`, `load_model`.

    Args:
        name: letters, digits, - and _.
        make: a function or class that returns the network, an nn.Module from pixels in [0, 1] to logits. It is called
            with those of `num_classes`, `channels` and `size` (height, width) that it has as parameters.
        overwrite: replace an earlier registration of the name, as when a cell of a notebook runs again.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
        raise UserError(f"the name of a model has letters, digits, - and _, got {name!r}. Write for example 'my-net'.")
    if built_in(name):
        raise UserError(f"{name!r} is the name of a built-in model. Choose another, for example 'my-{name}'.")
    if isinstance(make, nn.Module) or not callable(make):
        raise UserError(
            f"register_model takes a function that makes the network, got {type(make).__name__}. For one module: "
            "sparring.train(model=net)."
        )
    if own.MADE.get(name, make) is not make and not overwrite:
        raise UserError(f"{name!r} is registered already. Choose another name, or register it with overwrite=True.")
    own.MADE[name] = make


def name_model(text: str) -> None:
    """Take a network's name from the caller: an import path is followed, so that `build` knows it in this process.

    A name that was read from a file (`own.Recorded`) is not.
    """
    if not isinstance(text, str):
        raise UserError(f"model must be a name or an nn.Module, got {type(text).__name__}.")
    if own.is_import_path(text) and not isinstance(text, own.Recorded):
        own.follow(text)


def build(
    name: str,
    *,
    num_classes: int,
    channels: int = 3,
    size: tuple[int, int] = (32, 32),
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    pretrained: bool = True,
) -> nn.Module:
    """Build a network from pixels in [0, 1], (N, channels, *size), to logits (N, num_classes).

    `normalize` is (mean, std) per channel, the network's first layer. Initial weights come from torch's global random
    state; under `torch.device("meta")` nothing of a built-in network is allocated. `pretrained=False` fetches no
    weights for a name that asks for them (timm:NAME?pretrained).
    """
    if not built_in(name) and (name in own.MADE or name.startswith(TIMM) or own.unnamed(name)):
        made = _others(name, num_classes=num_classes, channels=channels, size=size, pretrained=pretrained)
        return with_normalisation(made, normalize, channels)
    architecture = _find(name)
    _require_int("num_classes", num_classes, least=2, most=_MOST)
    _require_int("channels", channels, least=1, most=_MOST)
    if not isinstance(size, Sequence) or len(size) != 2:
        raise UserError(f"size must be (height, width), got {size!r}. Write for example (32, 32).")
    height, width = size
    _require_int("the height of the images", height, least=1, most=_LARGEST_SIDE)
    _require_int("the width of the images", width, least=1, most=_LARGEST_SIDE)
    if min(height, width) < architecture.smallest:
        raise _too_small(name, architecture.smallest, height, width)
    return architecture.make(num_classes, channels, (height, width), _first_layer(normalize, channels))


def _others(name: str, *, num_classes: int, channels: int, size: tuple[int, int], pretrained: bool) -> nn.Module:
    """A network that is not built in."""
    if name in own.MADE:
        return own.call(own.MADE[name], name, num_classes=num_classes, channels=channels, size=size)
    if (error := own.unnamed(name)) is not None:
        raise error
    return build_timm(name, num_classes=num_classes, channels=channels, size=size, pretrained=pretrained)


def with_normalisation(
    network: nn.Module, normalize: tuple[Sequence[float], Sequence[float]] | None, channels: int
) -> nn.Module:
    """A network of the caller's own behind a normalising layer; the network itself where there is none."""
    if normalize is None:
        return network
    return nn.Sequential(OrderedDict(normalize=_first_layer(normalize, channels), network=network))


def _find(name: str) -> Architecture:
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    wrn = _WRN.fullmatch(name)
    if wrn is None:
        raise _unknown(name)
    depth, width, silu = int(wrn[1]), int(wrn[2]), wrn[3] is not None
    if width < 1:
        raise UserError(f"the width of a WRN must be at least 1, got {width} in {name!r}. Try 'wrn-{depth}-1'.")
    if depth > _DEEPEST or width > _WIDEST:
        raise UserError(
            f"a WRN has a depth of at most {_DEEPEST} and a width of at most {_WIDEST}, got {name!r}. Try 'wrn-34-10'."
        )
    about = f"wide ResNet, {blocks_per_stage(depth)} blocks per stage, {width} times as wide{', SiLU' * silu}"
    return _wrn(depth, width, about, silu=silu)


def _unknown(name: str) -> UserError:
    """The error for a name that is none, with how to name a network of one's own."""
    name = shown(name, 200)
    if name.endswith(".py") or re.search(r"\.py:|[/\\]", name):
        return UserError(f"unknown model {name!r}. A network of your own is named package.module:make, without .py.")
    error = unknown("model", name, [*ARCHITECTURES, "wrn-D-W", *(made for made in own.MADE if ":" not in made)])
    return UserError(f"{error} Your own: --model package.module:make, or sparring.register_model.")


def _require_int(what: str, value: int, *, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{what} must be a whole number of at least {least}, got {value!r}.")
    if value > most:
        raise UserError(f"{what} must be at most {most:,}, got {shown(str(value))}. Give the number of the data.")


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
