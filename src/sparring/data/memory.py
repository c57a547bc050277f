"""How much host memory images may take before they are read from disk, batch by batch."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 0.5  # of the memory that is available now


def host_room() -> int:
    """Bytes that a data set may take in host memory: half of what is available."""
    return int(_available() * _SHARE)


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return 8 * 2**30  # the system does not say
