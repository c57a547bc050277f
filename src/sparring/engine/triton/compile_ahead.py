"""Triton's kernels compiled side by side, before the first of them is to run.

A kernel is compiled where it is first launched, and so one after the other: half a minute for ResNet-18. The compiler
lets go of Python's lock, so threads need a fraction of it on a machine of many cores.
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
    """Run a kernel; in a block of `compiling` it is compiled and does not run.

    Not for kernels that torch's compiler meets: it does not know how to look up a context.
    """
    if _compile_only.get():
        kernel.warmup(*args, grid=grid, **named)
    else:
        kernel[grid](*args, **named)


@contextmanager
def compiling() -> Iterator[None]:
    """What `launch` is given in this block is compiled by threads, and is there at its end. It does not run.

    A kernel that cannot be compiled fails when it is launched in earnest.
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
