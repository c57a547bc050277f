"""Settings of the process that make torch fast on a CPU, made before torch is loaded. What the user has set stays.

- Threads of OpenMP that wait soon go to sleep: OMP_WAIT_POLICY for LLVM's library, GOMP_SPINCOUNT for libgomp, which
  torch's builds carry. By default they spin, and beside another busy process two threads then take many times as long
  as one (benchmarks/bench_busy_neighbour.py). To sleep at once costs an idle machine half of its speed on a small
  network: its threads wait for one another for some microseconds, about as long as these turns take.
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

_TURNS = 500  # that a thread waits for the others before it sleeps
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
        environment.update({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(_TURNS)})
    if not any(name in environment for name in _MALLOC):
        with suppress(OSError, AttributeError, TypeError):  # a system without glibc
            library = load(None)
            for option, value in _KEEP:
                library.mallopt(option, value)
