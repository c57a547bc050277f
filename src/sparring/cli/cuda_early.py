"""Initialise the CUDA driver in a thread while Python imports torch: both take seconds and are independent.

It calls the driver's C API, since torch is not imported yet. The context is the primary one, which torch uses later.
Errors are ignored here: code that needs the GPU later meets the same error and reports it.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

_COMMANDS = ("bench", "evaluate", "train")  # those that use a GPU in this process if there is one
_LIBRARY = "libcuda.so.1"


def start(words: Sequence[str], load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> threading.Thread | None:
    """Start a thread that creates the GPU's context, unless the command's words rule a GPU out."""
    number = _number(words)
    if number is None:
        return None
    thread = threading.Thread(
        target=context, args=(number, load)
    )  # not a daemon: an exit must not interrupt the driver
    thread.start()
    return thread


def context(number: int, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> None:
    """Create the primary context of a GPU, if there is a driver."""
    with suppress(OSError, AttributeError):
        cuda = load(_LIBRARY)
        device, created = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), number) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(created), device)


def _number(words: Sequence[str]) -> int | None:
    """The number of the GPU that a command will use, from a quick scan of its words; None for none."""
    if not words or words[0] not in _COMMANDS or {"-h", "--help"} & set(words):
        return None
    if "LOCAL_RANK" in os.environ:  # one process of several, each with its own GPU
        return None
    found = re.search(r"--device[ =]((\w+)(:(\d+))?)", " ".join(words))
    if found and found[2] not in ("auto", "cuda"):
        return None
    return int(found[4] or 0) if found else 0
