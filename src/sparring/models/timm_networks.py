"""timm's networks by name: `timm:resnet50`, and `timm:resnet50?pretrained` with their weights.

timm is an optional dependency, imported where such a name is used. With weights comes the normalisation they were
trained with, as the network's first layer. Names of timm's own table only: none that stands for a download or a folder.
"""

from __future__ import annotations

import importlib
import re
from collections import OrderedDict
from typing import Any

from torch import nn

from sparring.errors import UserError, did_you_mean
from sparring.models.normalize import Normalize

TIMM = "timm:"
_NAME = re.compile(r"timm:(?P<name>[\w.]+)(?P<weights>\?pretrained)?")


def has_weights(name: str) -> bool:
    """Whether the name asks for pretrained weights, which bring a normalisation of their own."""
    return name.endswith("?pretrained")


def build_timm(name: str, *, num_classes: int, channels: int, size: tuple[int, int], pretrained: bool) -> nn.Module:
    """timm's network for these images and classes.

    Args:
        pretrained: fetch the weights, where the name asks for them; else only what they need besides is built.
    """
    read = _NAME.fullmatch(name)
    if read is None:
        raise UserError(f"{name!r} is not a name of timm's. Write timm:resnet50, or timm:resnet50?pretrained.")
    timm, chosen = _timm(name), read["name"]
    if not timm.is_model(chosen.partition(".")[0]):  # behind the dot: which of its weights
        raise UserError(f"timm has no model {chosen!r}.{did_you_mean(chosen, timm.list_models())}")
    given: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    given["pretrained"] = pretrained and has_weights(name)
    try:
        network = _create(timm, chosen, size, given)
    except UserError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
        raise UserError(
            f"timm cannot make {chosen!r} for images of {channels}x{size[0]}x{size[1]} ({reason})."
        ) from error
    if not has_weights(name):
        return network
    about = getattr(network, "pretrained_cfg", {})
    mean, std = about.get("mean", ()), about.get("std", ())
    if len(mean) != channels:  # timm sums its first layer over the colours for other channels
        mean, std = [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels
    return nn.Sequential(OrderedDict(normalize=Normalize(mean, std), network=network))


def _create(timm: Any, chosen: str, size: tuple[int, int], given: dict[str, Any]) -> nn.Module:
    """Transformers are made for a size of images, convolutional networks take any."""
    try:
        made: nn.Module = timm.create_model(chosen, img_size=size, **given)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        made = timm.create_model(chosen, **given)
    return made


def _timm(name: str) -> Any:
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise UserError(
                f"{name} needs timm, which does not import here ({error}). Install that too, beside your torch."
            ) from error
        raise UserError(f"{name} needs timm, which is not installed: pip install 'sparring[timm]'.") from None
    except Exception as error:  # a torchvision built for another torch raises a RuntimeError
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{name} needs timm, which does not import here ({lines[0].rstrip('.')}). Install builds of timm and "
            "torchvision that fit your torch."
        ) from error
