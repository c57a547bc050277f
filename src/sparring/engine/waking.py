"""A GPU and its libraries made ready while something else is done, such as reading the data.

The first use of a GPU loads its driver, the first convolution cuDNN, the first product cuBLAS: seconds, in which Python
has nothing to do.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import torch
import torch.nn.functional as F


def wake(device: torch.device) -> None:
    """Begin to use a GPU, and come back at once. For others there is nothing to do."""
    if device.type == "cuda":  # no daemon: at an exit it would be cut off in the midst of the driver
        threading.Thread(target=first_use, args=(device,)).start()


def first_use(device: torch.device) -> None:
    """A convolution and a product of zeros; nobody waits for them."""
    with suppress(RuntimeError):  # whoever needs the device meets the same, and can say so
        image = torch.zeros((8, 64, 8, 8), dtype=torch.bfloat16, device=device)
        image = image.contiguous(memory_format=torch.channels_last)
        F.conv2d(image, image.new_zeros((64, 64, 3, 3)), padding=1)
        torch.mm(image.new_zeros((64, 64)), image.new_zeros((64, 64)))
