"""Where a start with a full compile cache goes on a GPU: variants of it, each a process of its own, and a profile.

PYTHONPATH=src python3 benchmarks/gpu_start_profile.py OUT.json [--rounds 2]

The first start fills the cache and is not counted. `no early driver` leaves out what begins the GPU sooner
(cli/early.py); `emptying` gives torch's cached memory back before each capture, as torch.cuda.graph does. Where Python
may not keep its bytecode (PYTHONDONTWRITEBYTECODE), it compiles torch's source at every start: 7 s.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS = ("as it is", "no early driver", "emptying")
RECIPE = "fat-cifar10-resnet18"


def start(variant: str, out: Path) -> None:
    """One start, in this process."""
    from sparring.cli import early, main

    if variant == "no early driver":
        early.wake = lambda words: None  # type: ignore[assignment]
    if variant == "emptying":
        from sparring.engine import graphs

        graphs.scarce = lambda free, total: True
    words = ["bench", RECIPE, "--only", "start-up", "--json", str(out)]
    if variant != "profile":
        raise SystemExit(main(words))
    profile = cProfile.Profile()
    profile.runcall(main, words)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(70)
    print(text.getvalue())


def run(variant: str, folder: Path) -> dict[str, float]:
    """The parts of a start in a fresh process."""
    out = folder / "start.json"
    command = [sys.executable, __file__, str(out), "--variant", variant]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(out.read_text())["start_up"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variant", default="")
    given = parser.parse_args()
    if given.variant:
        start(given.variant, given.out)
        return
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        run(VARIANTS[0], Path(folder))
        for _ in range(given.rounds):  # in turns: what else the machine does falls on all
            for variant in VARIANTS:
                found[variant].append(run(variant, Path(folder)))
                given.out.write_text(json.dumps(found, indent=1))
    for variant, starts in found.items():
        middle = {part: statistics.median(one[part] for one in starts) for part in starts[0]}
        print(f"{variant:18}", "  ".join(f"{part} {seconds:.1f}" for part, seconds in middle.items()))
    subprocess.run([sys.executable, __file__, str(given.out.with_suffix(".start")), "--variant", "profile"], check=True)


if __name__ == "__main__":
    main()
