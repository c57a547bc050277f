"""Images and labels as a caller has them, to tensors: NCHW, uint8 or float32 in [0, 1]; int64 class numbers.

Takes tensors, numpy arrays and PIL images. Whatever cannot be meant is refused in one line that names the fix. Must not
know data sets.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sparring.data.dataset import in_order
from sparring.errors import UserError

_CHANNELS = (1, 3, 4)
_LEVELS = "Put the normalisation into the model (normalize=True), and give pixels in [0, 1]."


def as_images(x: Any, name: str, *, channels_first: bool | None = None) -> Tensor:
    """A batch of images, contiguous NCHW on the CPU; floats that are multiples of 1/255 become uint8.

    Args:
        name: what to call them in an error.
        channels_first: whether NCHW is expected; None for arrays, where 1, 3 or 4 in the last place means NHWC.
    """
    if isinstance(x, np.ndarray):
        x = _array(x, name)
    if not isinstance(x, Tensor):
        raise UserError(f"the images of {name} are {_type(x)}; give a tensor or a numpy array of shape (n, c, h, w).")
    if x.layout != torch.strided:
        raise UserError(f"the images of {name} are a sparse tensor. Give x.to_dense().")
    x = x.detach().cpu()
    if x.ndim == 3:  # (n, h, w): grey
        x = x[:, None]
    if x.ndim != 4:
        raise UserError(f"the images of {name} have the shape {tuple(x.shape)}. Give (n, channels, height, width).")
    if 0 in x.shape:
        raise UserError(f"{name} is empty: its images have the shape {tuple(x.shape)}. Give at least one image.")
    if channels_first is None and x.shape[3] in _CHANNELS:
        x = x.permute(0, 3, 1, 2)
    elif x.shape[3] in _CHANNELS and x.shape[1] not in _CHANNELS:
        raise UserError(
            f"the images of {name} have the shape {tuple(x.shape)}: the channels look last. Give "
            "(n, channels, height, width): x.permute(0, 3, 1, 2)."
        )
    return in_levels(in_order(x), name)


def in_levels(x: Tensor, name: str) -> Tensor:
    """Pixels as uint8 where they are its levels, else float32 in [0, 1]; anything else is refused."""
    if x.dtype == torch.uint8:
        if len(x) >= 8 and int(x.max()) == 1:
            raise UserError(f"the images of {name} are uint8 with no value above 1, of 255. Give x * 255.")
        return x
    if x.dtype == torch.bool or not x.is_floating_point():
        raise UserError(f"the images of {name} are {x.dtype}. Give uint8, 0 to 255, or floats in [0, 1].")
    x = x.to(torch.float32)
    low, high = (bound.item() for bound in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):  # NaN survives aminmax
        broken = int((~x.isfinite()).sum())
        raise UserError(
            f"the images of {name} must lie in [0, 1], found {broken} of {x.numel()} values NaN or infinite. Look at "
            "the data and their transform."
        )
    if not (low >= 0 and high <= 1):
        if low >= 0 and 1 < high <= 255:
            raise UserError(
                f"the images of {name} are floats from {low:g} to {high:g}; floats must lie in [0, 1]. Divide by 255."
            )
        raise UserError(f"the images of {name} are floats from {low:g} to {high:g}; they must lie in [0, 1]. {_LEVELS}")
    levels = (x * 255).round()
    return levels.to(torch.uint8) if torch.equal(levels / 255, x) else x


def as_labels(y: Any, name: str) -> Tensor:
    """Labels as int64 (n,) on the CPU."""
    if isinstance(y, np.ndarray) and y.dtype.kind in "USO":
        raise UserError(f"the labels of {name} are words. Give class numbers: np.unique(y, return_inverse=True)[1].")
    if isinstance(y, np.ndarray):
        y = torch.from_numpy(np.ascontiguousarray(y))
    if isinstance(y, list | tuple):
        if not all(isinstance(label, int | np.integer) and not isinstance(label, bool) for label in y):
            raise UserError(f"the labels of {name} must be whole numbers, one class number per image.")
        y = torch.tensor([int(label) for label in y], dtype=torch.int64)
    if not isinstance(y, Tensor):
        raise UserError(f"the labels of {name} are {_type(y)}; give int64 class numbers, one per image.")
    y = y.detach().cpu()
    if y.ndim == 2 and y.shape[1] > 1:
        raise UserError(
            f"the labels of {name} have the shape {tuple(y.shape)}: one-hot, it seems. Give class numbers: y.argmax(1)."
        )
    if y.ndim == 2:
        y = y[:, 0]
    if y.ndim != 1:
        raise UserError(f"the labels of {name} have the shape {tuple(y.shape)}; give one class number per image, (n,).")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise UserError(f"the labels of {name} are {y.dtype}; class numbers are integers. Give y.long().")
    found: Tensor = y.to(torch.int64)
    if len(found) and int(found.min()) < 0:
        raise UserError(f"the labels of {name} hold {int(found.min())}; number the classes from 0.")
    return found


def count_classes(y: Tensor, name: str) -> int:
    """The number of classes, one above the greatest label; labels from 1 are refused."""
    return classes_from(int(y.min()), int(y.max()), len(y), name)


def classes_from(low: int, high: int, images: int, name: str) -> int:
    """The number of classes of labels from `low` to `high`."""
    if low == high:
        raise UserError(f"{name} holds one class only, label {low}. Give two or more.")
    if low == 1:
        raise UserError(f"the labels of {name} are 1 to {high}; classes are numbered from 0. Give y - 1.")
    if high >= max(images, 2):
        raise UserError(
            f"{name} has {images} images and a label {high}. Number the classes from 0 without gaps: "
            "torch.unique(y, return_inverse=True)[1]."
        )
    return high + 1


def one_image(value: Any, where: str) -> Tensor:
    """One image, CHW, uint8 or float32, from a PIL image, an array (HWC or CHW) or a tensor (CHW)."""
    if isinstance(value, Image.Image):
        value = np.asarray(value if value.mode in ("L", "RGB") else value.convert("L" if value.mode == "1" else "RGB"))
        found: Tensor = torch.from_numpy(np.atleast_3d(value).copy()).permute(2, 0, 1)
        return found
    if isinstance(value, np.ndarray):
        if value.ndim == 2:
            value = value[:, :, None]
        if value.ndim == 3 and value.shape[2] not in _CHANNELS and value.shape[0] in _CHANNELS:
            value = value.transpose(1, 2, 0)
        value = torch.from_numpy(np.ascontiguousarray(_array(value, where).permute(2, 0, 1).numpy()))
    if isinstance(value, Tensor):
        return as_images(value[None, None] if value.ndim == 2 else value[None], where, channels_first=True)[0]
    raise UserError(
        f"the image of {where} is {_type(value)}; give a tensor (c, h, w), an array or a PIL image. "
        "For other objects, convert them in the Dataset."
    )


def one_label(value: Any, where: str) -> int:
    """One class number."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        found = np.asarray(value)
        if found.size > 1:
            raise UserError(f"the label of {where} has {found.size} values: one-hot, it seems. Give its argmax.")
        value = found.item() if found.size else None
    if type(value) is not int or value < 0:
        raise UserError(f"the label of {where} is {value!r}; give a class number, an integer from 0.")
    return value


def _array(x: np.ndarray[Any, Any], name: str) -> Tensor:
    """A numpy array of images as a tensor."""
    if x.dtype.kind not in "uif":
        raise UserError(f"the images of {name} are {x.dtype}. Give uint8, 0 to 255, or floats in [0, 1].")
    if x.dtype.kind == "f":
        x = x.astype(np.float32)
    elif x.dtype != np.uint8:
        raise UserError(f"the images of {name} are {x.dtype}; whole numbers must be uint8. Give x.astype(np.uint8).")
    return torch.from_numpy(np.ascontiguousarray(x))


def _type(value: Any) -> str:
    """What a thing is, in words that help to replace it."""
    name = type(value).__name__
    if name == "DataLoader":
        return "a DataLoader (give it alone, not as x: data=loader)"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
