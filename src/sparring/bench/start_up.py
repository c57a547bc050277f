"""Seconds from the start of a process to the end of its first step, in parts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from sparring.files.schema import having, number

_IMPORTED = time.time()
_PARTS = ("imports", "data", "device", "attack", "update")
# What another process measured of its own start.
START_UP = having(("first_step_s", "process_s", *(f"{part}_s" for part in _PARTS)), number(-1e9, 1e9))


def start_up(given: float, began: float, attacked: float, done: float) -> dict[str, float]:
    """Seconds of every part, of the engine's two (`first_step_s`), and of all.

    Args:
        given: when the data were loaded; all of these in seconds since the epoch.
        began: when the model was made.
        attacked: when the first attack was finished.
        done: when the first update was finished.
    """
    process = _process_began()
    places = (process, _IMPORTED, given, began, attacked, done)
    parts = {f"{name}_s": after - before for name, before, after in zip(_PARTS, places, places[1:], strict=False)}
    return parts | {"first_step_s": done - began, "process_s": done - process}


def start_in_words(start: Mapping[str, float]) -> str:
    """A start-up in words, with its parts in order."""
    parts = ", ".join(f"{name} {start[f'{name}_s']:.1f}" for name in _PARTS)
    return f"{start['first_step_s']:.1f} s, {start['process_s']:.1f} s after the process began ({parts})"


def _process_began() -> float:
    """When the process began, by Linux's ticks since boot; elsewhere, when this module was imported."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _IMPORTED
