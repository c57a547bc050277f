"""The GPU's driver begun while Python still reads torch: both take seconds, and neither needs the other.

Without torch, so by the driver's own C calls. The context it makes is the one that torch uses later (the primary one).
Nothing here can fail for the user: whoever needs the GPU afterwards meets the same trouble, and can say so.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

_COMMANDS = ("bench", "evaluate", "train")  # those that compute in this process, on a GPU where there is one
_LIBRARY = "libcuda.so.1"


def wake(words: Sequence[str], load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> threading.Thread | None:
    """Begin a thread that makes the GPU's context, if a command's words ask for a GPU or leave it open."""
    number = _number(words)
    if number is None:
        return None
    thread = threading.Thread(target=context, args=(number, load))  # no daemon: an exit would cut the driver off
    thread.start()
    return thread


def context(number: int, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> None:
    """Make the primary context of a GPU, where there is a driver."""
    with suppress(OSError, AttributeError):
        cuda = load(_LIBRARY)
        device, made = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), number) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), device)


def _number(words: Sequence[str]) -> int | None:
    """The GPU that will be used, as far as it can be told without reading everything; None for none."""
    if not words or words[0] not in _COMMANDS or {"-h", "--help"} & set(words):
        return None
    if "LOCAL_RANK" in os.environ:  # one process of several, each with its own GPU
        return None
    found = re.search(r"--device[ =]((\w+)(:(\d+))?)", " ".join(words))
    if found and found[2] not in ("auto", "cuda"):
        return None
    return int(found[4] or 0) if found else 0
