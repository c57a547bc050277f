"""Triton kernels compiled side by side, before the first of them runs.

A kernel is compiled at its first launch, and so one after the other: half a minute for ResNet-18. The compiler releases
Python's lock, so threads need a fraction of it on a machine of many cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import triton

_compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """Run a kernel; in a block of `compiling` compile it without running it.

    Not for kernels inside torch.compile, which cannot read a context variable.
    """
    if _compile_only.get():
        kernel.warmup(*args, grid=grid, **named)
    else:
        kernel[grid](*args, **named)


@contextmanager
def compiling() -> Iterator[None]:
    """Compile all kernels that are launched in this block, in threads, and wait for them at its end. None runs.

    A kernel that cannot be compiled fails when it is launched outside such a block.
    """
    side_by_side = getattr(triton, "AsyncCompileMode", None)  # an older Triton compiles one after the other
    before = _compile_only.set(True)
    try:
        with (
            ThreadPoolExecutor() as threads,
            side_by_side(threads, ignore_errors=True) if side_by_side else nullcontext(),
        ):
            yield
    finally:
        _compile_only.reset(before)
