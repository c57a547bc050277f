"""Which sizes of a step are faster in parts side by side? One GPU, random images. The answer is `CUTS` of parts.py.

PYTHONPATH=src python3 benchmarks/gpu_cuts.py OUT.json [MODEL] [GO]

Compiles, and then waits for the file GO, so that others can measure meanwhile. Profiles of a whole step and of the
update are written beside OUT.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from gpu_engine_check import BATCH, DEVICE, SHAPE, made
from gpu_profile import milliseconds, table

from sparring.engine.graphs import Captured
from sparring.engine.parts import Parted

CUTS: dict[int, tuple[tuple[int, ...], ...]] = {
    128: ((96, 32), (64, 64), (80, 48), (64, 32, 32), (48, 40, 40), (112, 16)),
    112: ((96, 16), (64, 48), (56, 56)),
    96: ((48, 48), (64, 32), (80, 16)),
    80: ((40, 40), (48, 32), (64, 16)),
    64: ((32, 32), (48, 16), (40, 24)),
    56: ((32, 24), (40, 16)),
    48: ((24, 24), (32, 16)),
    40: ((24, 16), (32, 8)),
    32: ((16, 16), (24, 8)),
    24: ((16, 8),),
    16: ((8, 8),),
}


def main() -> None:
    out, name = Path(sys.argv[1]), (sys.argv[2:] or ["wrn-34-10"])[0]
    torch.backends.cudnn.benchmark = True
    _, engine, _ = made(name, half=True)
    print(engine.line, "fused" if engine.update.working.fused is not None else "compiled", flush=True)
    network, pool = engine.walk.network, torch.cuda.graph_pool_handle()
    network = network.network if isinstance(network, Parted) else network
    x = torch.rand(BATCH, *SHAPE, device=DEVICE)
    y = torch.randint(0, 10, (BATCH,), device=DEVICE)
    slope = torch.randn(BATCH, 10, device=DEVICE)
    network(x[:8].clone().requires_grad_()).sum().backward()
    print("compiled", flush=True)
    while sys.argv[3:] and not Path(sys.argv[3]).exists():
        time.sleep(0.5)
    ms = milliseconds(lambda: engine.update(x, x, y, 0.0), 12)
    print(f"{name} update: {ms[0]:.3f} ms ({ms[1]:.3f}-{ms[2]:.3f})", flush=True)
    rows, kept, best = [], [], {}  # graphs that share a pool live as long as it
    for size, cuts in CUTS.items():
        for cut in ((size,), *cuts):
            parted = Parted(network, DEVICE, {size: cut} if len(cut) > 1 else {})
            kept.append(Captured(lambda p=parted, s=size: p.ahead(x[:s])[1](slope[:s]), pool))
            times = milliseconds(kept[-1], 12)
            rows.append({"size": size, "cut": cut, "ms": times})
            print(f"{name} {size} as {cut}: {times[0]:.3f} ms ({times[1]:.3f}-{times[2]:.3f})", flush=True)
        here = [row for row in rows if row["size"] == size]
        fastest = min(here, key=lambda row: row["ms"][0])
        if fastest["ms"][0] <= 0.98 * here[0]["ms"][0]:
            best[size] = fastest["cut"]
    print("CUTS =", dict(sorted(best.items())), flush=True)
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    where["ms"] = "median, lowest and highest of 12 means of 5"
    out.write_text(json.dumps(where | {"update_ms": ms, "rows": rows}, indent=1))
    for size, graph in (("update", lambda: engine.update(x, x, y, 0.0)), ("step-128", kept[0])):
        table(f"{name}-{size}", graph, out.parent)


if __name__ == "__main__":
    main()
