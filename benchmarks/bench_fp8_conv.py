"""Speed of the attack's convolutions in eight bits on one GPU, by tiling, beside cuDNN in bf16.

    PYTHONPATH=src python3 benchmarks/bench_fp8_conv.py [OUT.json] [--model resnet18] [--seconds 110]

The layers are those of WRN-34-10 (160, 320 and 640 channels, and the two that halve the image) or those of ResNet-18
(64 to 512 channels, and the three that halve it); forward and back to the input, with what engine/triton/fp8_conv.py
does in the same launch. cuDNN runs the convolution alone. Every tiling is first compared with torch on the same rounded
numbers, on five images, and must give the same bits every time. Times are medians of twelve replays of a captured graph
of twelve launches, which take turns among three random inputs. Needs no data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from sparring.engine.manual import fp8_simulated
from sparring.engine.triton import fp8_conv, tuning
from sparring.engine.triton.compile_ahead import compiling
from sparring.engine.triton.tuning import Fp8Cut

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda")
SETS, LAUNCHES = 3, 12
TIMES = 10  # that a result is computed, to compare its bits
ALLOWED = 0.03  # relative error: a sum of another order may be rounded to a neighbour
LIBRARY = "cuDNN bf16"
KINDS = ("forward", "forward+sum", "back", "back+sum")


@dataclass(frozen=True)
class Shape:
    """A convolution: `side` is that of the larger image, which has `low` channels."""

    low: int
    high: int
    side: int

    @property
    def stride(self) -> int:
        return 1 if self.low == self.high else 2

    def __str__(self) -> str:
        return f"{self.low}@{self.side}" if self.stride == 1 else f"{self.low}>{self.high}@{self.side}"

    def flops(self, images: int) -> float:
        return 2 * images * (self.side // self.stride) ** 2 * self.low * self.high * 9


SHAPES = {
    "wrn-34-10": (Shape(160, 160, 32), Shape(320, 320, 16), Shape(640, 640, 8)),
    "resnet18": (Shape(64, 64, 32), Shape(128, 128, 16), Shape(256, 256, 8), Shape(512, 512, 4)),
}
STRIDED = {
    "wrn-34-10": (Shape(160, 320, 32), Shape(320, 640, 16)),
    "resnet18": (Shape(64, 128, 32), Shape(128, 256, 16), Shape(256, 512, 8)),
}
# Tilings beside those in use (tuning.py), by the channels of the sum.
MORE: dict[int, tuple[Fp8Cut, ...]] = {
    160: (
        Fp8Cut("places", 128, 128, 32, 128, tail=32, stages=3),
        Fp8Cut("mixed", 64, 128, 32, 128, tail=32, stages=3),
        Fp8Cut("mixed", 128, 128, 32, 128, tail=32, stages=3, warps=8),
        Fp8Cut("channels", 256, 128, 64, 128, tail=32, stages=3, warps=8),
        Fp8Cut("mixed", 256, 128, 32, 32, stages=6, warps=8),
    ),
    320: (
        Fp8Cut("mixed", 128, 128, 32, 128, tail=64, stages=3),
        Fp8Cut("places", 128, 128, 32, 128, tail=64, stages=3),
        Fp8Cut("mixed", 64, 128, 32, 128, tail=64, stages=3),
        Fp8Cut("channels", 128, 256, 64, 128, tail=64, warps=8),
        Fp8Cut("channels", 64, 64, 0, 128, tail=64),
        Fp8Cut("channels", 128, 64, 0, 128, tail=64),
    ),
    640: (
        Fp8Cut("mixed", 128, 128, 32, 128, stages=3),
        Fp8Cut("places", 128, 128, 32, 128, stages=3),
        Fp8Cut("channels", 128, 128, 0, 128, stages=3),
        Fp8Cut("channels", 128, 64, 0, 128),
        Fp8Cut("channels", 64, 128, 0, 128),
        Fp8Cut("channels", 64, 64, 0, 128, stages=5),
    ),
    64: (
        Fp8Cut("places", 64, 64, 0, 64, stages=5),
        Fp8Cut("places", 128, 64, 0, 64, stages=5),
        Fp8Cut("places", 256, 64, 0, 64, warps=8),
        Fp8Cut("channels", 128, 64, 0, 64, stages=5),
        Fp8Cut("channels", 256, 64, 0, 64, warps=8),
        Fp8Cut("places", 128, 128, 0, 64, stages=5),
        Fp8Cut("places", 256, 128, 0, 64, warps=8),
    ),
    128: (
        Fp8Cut("places", 64, 128, 0, 128),
        Fp8Cut("places", 128, 128, 0, 128),
        Fp8Cut("channels", 128, 128, 0, 128),
        Fp8Cut("channels", 128, 64, 0, 128, stages=5),
        Fp8Cut("channels", 256, 128, 0, 128, stages=3, warps=8),
        Fp8Cut("places", 256, 128, 0, 128, stages=3, warps=8),
        Fp8Cut("places", 128, 64, 0, 128, stages=5),
        Fp8Cut("places", 256, 64, 0, 128, warps=8),
        Fp8Cut("places", 64, 64, 0, 128, stages=5),
    ),
    256: (
        Fp8Cut("places", 128, 128, 0, 128),
        Fp8Cut("channels", 128, 256, 0, 128, stages=3, warps=8),
        Fp8Cut("channels", 64, 128, 0, 128, stages=5),
        Fp8Cut("channels", 64, 64, 0, 128, stages=5),
        Fp8Cut("places", 64, 128, 0, 128, stages=5),
        Fp8Cut("places", 128, 64, 0, 128, stages=5),
        Fp8Cut("places", 64, 64, 0, 128, stages=5),
        Fp8Cut("places", 256, 128, 0, 128, stages=3, warps=8),
    ),
    512: (
        Fp8Cut("channels", 128, 256, 0, 128, stages=3, warps=8),
        Fp8Cut("channels", 64, 256, 0, 128, warps=8),
        Fp8Cut("channels", 64, 128, 0, 128, stages=5),
        Fp8Cut("channels", 64, 64, 0, 128, stages=5),
        Fp8Cut("channels", 32, 64, 0, 128, stages=5),
        Fp8Cut("places", 64, 128, 0, 128, stages=5),
        Fp8Cut("places", 64, 64, 0, 128, stages=5),
        Fp8Cut("places", 128, 128, 0, 128),
    ),
}


def text(cut: Fp8Cut) -> str:
    inner = f"{cut.inner}+{cut.tail}" if cut.tail else f"{cut.inner}"
    return f"{cut.order} {cut.places}x{cut.one}+{cut.two} k{inner} s{cut.stages} w{cut.warps}"


def cuts_of(shape: Shape, kind: str) -> list[Fp8Cut]:
    """The tilings in use first."""
    inner, outer = (shape.low, shape.high) if kind.startswith("forward") else (shape.high, shape.low)
    used = [cut for _, cut in tuning.of(DEVICE).fp8.get((outer, inner), ())]
    return list(dict.fromkeys([*used, *MORE[inner]]))


class Layer:
    """A convolution's tensors: activations after a ReLU, or gradients of both signs."""

    def __init__(self, images: int, shape: Shape, kind: str, seed: int) -> None:
        draw = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=DEVICE, generator=draw)

        self.shape, self.kind, small = shape, kind, shape.side // shape.stride
        forward = kind.startswith("forward")
        inner, outer = (shape.low, shape.high) if forward else (shape.high, shape.low)
        side, out_side = (shape.side, small) if forward else (small, shape.side)
        x = normal(images, side, side, inner) * 28
        self.x = x.clamp(min=0).to(E4M3) if forward else x.to(E5M2)
        self.weight = (normal(outer, 9 * inner) * 80).clamp(-448, 448).to(E4M3)
        f = 1 / (80 * (9 * inner) ** 0.5)
        self.numbers = torch.tensor([f, 1.0, f], device=DEVICE)
        size = (images, out_side, out_side, outer)
        self.added = normal(*size).bfloat16() * 28
        self.seen = normal(*size).clamp(min=0).to(E4M3)
        self.scale, self.shift = (1 + 0.1 * normal(outer)).bfloat16(), (10 * normal(outer)).bfloat16()

    def run(self, ops: Any = fp8_conv) -> tuple[Tensor, ...]:
        """What the kernel returns, or torch."""
        given, stride = (self.x, self.weight, self.numbers), self.shape.stride
        if self.kind == "forward":
            return (ops.conv_relu(*given, self.shift, stride=stride),)
        if self.kind == "forward+sum":
            more = {"added": self.added, "kept": True, "dtype": E4M3}
            return ops.conv_sum(*given, self.scale, self.shift, **more)  # type: ignore[no-any-return]
        if self.kind == "back":
            return (ops.conv_back_relu(*given, self.seen, among=None, dtype=E5M2),)
        more = {"among": None, "stride": stride, "added": self.added}
        return ops.conv_back_sum(*given, self.seen, self.scale, **more)  # type: ignore[no-any-return]

    def cudnn(self) -> Callable[[], Any]:
        """The convolution alone, in bf16."""
        x, stride = self.x.bfloat16().permute(0, 3, 1, 2), [self.shape.stride] * 2
        weight = self.weight.bfloat16().reshape(len(self.weight), 3, 3, -1).permute(0, 3, 1, 2)
        if self.kind.startswith("forward"):
            return lambda: F.conv2d(x, weight, padding=1, stride=stride)
        forward = weight.transpose(0, 1).contiguous(memory_format=torch.channels_last)
        like = torch.empty_like(self.added).permute(0, 3, 1, 2)
        back, pair, mask = torch.ops.aten.convolution_backward, [1, 1], [True, False, False]
        return lambda: back(x, like, forward, None, stride, pair, pair, False, [0, 0], 1, mask)


def use(cut: Fp8Cut) -> None:
    fp8_conv.cut_of = lambda x, outer, places: cut  # type: ignore[assignment]


def seconds_of(works: list[Callable[[], Any]]) -> float:
    """Of one of these, which take turns in a captured graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(LAUNCHES):
            works[number % len(works)]()
    graph.replay()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return statistics.median(times)


def repeats(layer: Layer) -> bool:
    """Whether launches in quick succession give the same bits."""
    several = [layer.run() for _ in range(TIMES)]
    return all(
        torch.equal(a.view(torch.int8), b.view(torch.int8))
        for one in several[1:]
        for a, b in zip(several[0], one, strict=True)
    )


def right(row: dict[str, Any]) -> bool:
    """Whether a tiling computes what it should, every time."""
    return row.get("error", 0.0) < ALLOWED and row.get("repeats", True)


class Bench:
    """Checks and times, until the time is up."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.errors: dict[tuple[Shape, str, Fp8Cut], float] = {}
        self.inputs: tuple[Any, list[Layer]] = (None, [])

    def error(self, shape: Shape, kind: str, cut: Fp8Cut) -> float:
        """The largest relative error on five images, which do not fill the last program."""
        key = (shape, kind, cut)
        if key not in self.errors:
            layer = Layer(5, shape, kind, 7)
            pairs = zip(layer.run(), layer.run(fp8_simulated), strict=True)
            self.errors[key] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
        return self.errors[key]

    def measure(self, images: int, shape: Shape, kind: str, cut: Fp8Cut | None) -> None:
        """Of a tiling, or of cuDNN."""
        if time.monotonic() > self.until:
            return
        key = (images, shape, kind)
        if self.inputs[0] != key:
            self.inputs = (key, [Layer(images, shape, kind, seed) for seed in range(SETS)])
        row: dict[str, Any] = {"images": images, "shape": str(shape), "kind": kind}
        row["cut"] = LIBRARY if cut is None else text(cut)
        self.rows.append(row)
        try:
            if cut is not None:
                use(cut)
                row["error"] = self.error(shape, kind, cut)
                row["repeats"] = repeats(self.inputs[1][0])
            seconds = seconds_of([layer.run if cut is not None else layer.cudnn() for layer in self.inputs[1]])
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:160]}"
        else:
            row |= {"us": seconds * 1e6, "tflops": shape.flops(images) / seconds / 1e12}
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), flush=True)

    def best(self, images: int, shape: Shape, kind: str) -> list[dict[str, Any]]:
        """The rows of a layer, the fastest first."""
        here = (images, str(shape), kind)
        rows = [row for row in self.rows if (row["images"], row["shape"], row["kind"]) == here and "us" in row]
        return sorted((row for row in rows if right(row)), key=lambda row: row["us"])


def compile_all(wanted: Iterable[tuple[Shape, str, Fp8Cut]]) -> None:
    """Compile these side by side; what cannot be compiled fails when it is measured."""
    began = time.monotonic()
    with compiling():
        for shape, kind, cut in wanted:
            use(cut)
            Layer(1, shape, kind, 0).run()
    print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--model", choices=sorted(SHAPES), default="wrn-34-10")
    parser.add_argument("--seconds", type=float, default=110, help="measure nothing more after this time")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench = Bench(given.seconds)
    shapes = SHAPES[given.model]
    every = [(shape, kind) for shape in shapes for kind in KINDS]
    every += [(shape, kind) for shape in STRIDED[given.model] for kind in ("forward", "back+sum")]
    compile_all((shape, kind, cut) for shape, kind in every for cut in cuts_of(shape, kind))
    sizes = (128, 1024, 16, 40, 64, 8, 24)
    try:
        for images in sizes:
            for shape, kind in every:
                if images == 128 or kind in ("forward", "back+sum"):
                    for cut in (None, *cuts_of(shape, kind)):
                        bench.measure(images, shape, kind, cut)
    finally:
        if given.out is not None:
            about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
            about["n"] = (
                "medians of 12 replays of 12 launches over 3 inputs; error on 5 images; "
                f"repeats: the same bits in {TIMES} launches"
            )
            about["command"] = (
                f"python benchmarks/bench_fp8_conv.py OUT.json --model {given.model} --seconds {given.seconds:g}"
            )
            rows = ",\n".join(json.dumps(row) for row in bench.rows)
            given.out.write_text(json.dumps(about)[:-1] + f', "rows": [\n{rows}\n]}}\n')
    for images in sizes:
        for shape, kind in every:
            rows = bench.best(images, shape, kind)
            if rows:
                print(images, shape, kind, "; ".join(f"{row['tflops']:.0f} {row['cut']}" for row in rows[:4]))
    wrong = [row for row in bench.rows if "failed" in row or not right(row)]
    print(f"{len(wrong)} failed or wrong of {len(bench.rows)}", *wrong, sep="\n")


if __name__ == "__main__":
    main()
