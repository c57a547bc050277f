"""The same bits from the same seed, on the same kind of GPU with the same software.

By default cuDNN times its algorithms for the few batch sizes of an attack and takes the fastest, so that two machines
may take different ones, which round differently. Inside `deterministic` nothing is chosen by time, and of torch's and
cuDNN's algorithms only those run that add in a fixed order; the package's own kernels always do. A CPU needs none of
this: there a run is repeated bit for bit as long as its number of threads is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without a fixed workspace cuBLAS may add in another order each time


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Take deterministic algorithms alone inside the block, where `wanted`. Begin it before the first use of cuBLAS."""
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic  # its one switch is made at run time
    before = cudnn.deterministic, cudnn.benchmark, torch.get_deterministic_debug_mode()
    filled = memory.fill_uninitialized_memory
    os.environ.setdefault(_CUBLAS, ":4096:8")
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch names an operation that has none
        memory.fill_uninitialized_memory = False  # every kernel writes all of its output
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before[:2]
        torch.set_deterministic_debug_mode(before[2])
        memory.fill_uninitialized_memory = filled
