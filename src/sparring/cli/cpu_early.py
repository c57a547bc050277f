"""Settings of the process that make torch fast on a CPU, made before torch is loaded. What the user has set stays.

- Threads of OpenMP that wait go to sleep (OMP_WAIT_POLICY, which libgomp, in torch's builds, and LLVM's library read).
  By default they spin, and beside another busy process two threads then take many times as long as one
  (benchmarks/bench_busy_neighbour.py).
- Freed memory stays with the process. glibc's malloc gives large blocks back to the system, and each of the next ones
  is then mapped page by page: a fifth of a training step of Small CNN, more of a smaller network.

`import sparring` alone changes neither.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_MALLOC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
# malloc.h: M_MMAP_THRESHOLD (32 MiB is the most it takes), M_TRIM_THRESHOLD, M_TOP_PAD; in bytes.
_KEEP = ((-3, 32 << 20), (-1, 2**31 - 1), (-2, 64 << 20))


def start(
    environment: MutableMapping[str, str] = os.environ, load: Callable[[None], ctypes.CDLL] = ctypes.CDLL
) -> None:
    """Make the settings, unless torch has been loaded: the process is then not the command's alone."""
    if "torch" in sys.modules:
        return
    if not any(name in environment for name in _WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    if not any(name in environment for name in _MALLOC):
        with suppress(OSError, AttributeError, TypeError):  # a system without glibc
            library = load(None)
            for option, value in _KEEP:
                library.mallopt(option, value)
