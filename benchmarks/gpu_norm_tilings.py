"""How should the kernels of norm.py be cut? Times of layers of ResNet-18 and WRN-34-10 for some cuts, one GPU.

PYTHONPATH=src python3 benchmarks/gpu_norm_tilings.py OUT.json
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from gpu_profile import milliseconds

from sparring.engine import norm
from sparring.engine.graphs import Captured

SHAPES = ((64, 32), (128, 16), (256, 8), (512, 4), (160, 32), (320, 16), (640, 8))
USUAL = {name: getattr(norm, name) for name in ("_CHANNELS", "_ROWS", "_ROWS_BACK", "_PROGRAMS", "_TILE", "_STAGES")}


def timed(channels: int, side: int, cut: dict[str, int]) -> tuple[float, float]:
    """Microseconds of ten layers forward and ten back, each by one."""
    for name, value in (USUAL | cut).items():
        setattr(norm, name, value)
    device = torch.device("cuda")
    x, z, g = (torch.randn(128, channels, side, side, device=device, dtype=torch.bfloat16) for _ in range(3))
    x, z, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, z, g))
    gain, shift, mean, var = (torch.rand(channels, device=device) for _ in range(4))
    arrived = torch.zeros(256, dtype=torch.int32, device=device)
    how = {"bias": None, "relu": True, "eps": 1e-5, "momentum": 0.1}
    y, facts = norm.forward(x, gain, shift, (mean, var), arrived, z=z, **how)

    def ahead() -> None:
        for _ in range(10):
            norm.forward(x, gain, shift, (mean, var), arrived, z=z, **how)

    def back() -> None:
        for _ in range(10):
            norm.back((g,), x, y, facts, arrived, relu=True, keep=True)

    kept = [Captured(work, torch.cuda.graph_pool_handle()) for work in (ahead, back)]
    return tuple(100 * milliseconds(graph, 5)[0] for graph in kept)


def main() -> None:
    rows = []
    cuts = [{}] + [
        {"_ROWS": r, "_ROWS_BACK": b, "_PROGRAMS": p, "_STAGES": s}
        for (r, b), p, s in itertools.product(((64, 32), (128, 64), (256, 128)), (264, 528), (1, 2, 3, 4))
    ]
    for (channels, side), cut in itertools.product(SHAPES, cuts):
        try:
            ahead, back = timed(channels, side, cut)
        except Exception as error:  # a cut that asks too much of a processor
            print(channels, cut, type(error).__name__)
            continue
        rows.append({"channels": channels, "side": side, **cut, "forward_us": ahead, "back_us": back})
    for channels, _ in SHAPES:
        here = [row for row in rows if row["channels"] == channels]
        for what in ("forward_us", "back_us"):
            best = sorted(here, key=lambda row: row[what])[:3]
            print(
                channels,
                what,
                round(here[0][what], 1),
                [{k: v for k, v in row.items() if k[0] == "_" or k == what} for row in best],
            )
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    where["us"] = "of one layer, batch 128: median of 5 means of 5 runs of ten layers"
    Path(sys.argv[1]).write_text(json.dumps(where | {"usual": USUAL, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
