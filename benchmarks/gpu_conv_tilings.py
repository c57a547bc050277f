"""How should a convolution of the attack be cut? Every layer of ResNet-18, both ways, many cuts, against cuDNN.

PYTHONPATH=src python3 benchmarks/gpu_conv_tilings.py $OUT/tilings.json

Times are per launch, by a captured graph of 30 in a row. "cudnn" is what the engine does without the kernel: the fused
convolution forward; the convolution and the masks and sums behind it back.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time

import torch

from sparring.engine import conv as conv_module
from sparring.engine import ends as ends_module
from sparring.engine import kernels, pointwise
from sparring.engine.conv import Tiling, conv, conv_back

BATCHES = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
# name: (inner, outer, side of the image that is read, stride, back, shortcut's channels)
LAYERS = {
    "f64": (64, 64, 32, 1, False, 0),
    "f128-down": (64, 128, 32, 2, False, 0),
    "f128": (128, 128, 16, 1, False, 0),
    "f128-short": (128, 128, 16, 1, False, 64),
    "f256-down": (128, 256, 16, 2, False, 0),
    "f256": (256, 256, 8, 1, False, 0),
    "f512-down": (256, 512, 8, 2, False, 0),
    "f512": (512, 512, 4, 1, False, 0),
    "f512-short": (512, 512, 4, 1, False, 256),
    "b64": (64, 64, 32, 1, True, 0),
    "b128": (128, 128, 16, 1, True, 0),
    "b256": (256, 256, 8, 1, True, 0),
    "b512": (512, 512, 4, 1, True, 0),
    "b128-down": (128, 64, 16, 2, True, 128),
    "b256-down": (256, 128, 8, 2, True, 256),
    "b512-down": (512, 256, 4, 2, True, 512),
}
# (places, outer, inner, warps, stages, splits)
SHAPES = (
    (64, 64, 64, 4, 3, (1, 2, 4, 8)),
    (64, 64, 128, 4, 3, (1, 2)),
    (64, 128, 64, 4, 3, (1, 2)),
    (64, 128, 64, 4, 4, (1, 2)),
    (128, 128, 64, 4, 3, (1,)),
    (128, 128, 64, 8, 3, (1,)),
    (128, 64, 64, 4, 3, (1, 2)),
    (128, 64, 64, 4, 4, (1,)),
    (128, 64, 64, 8, 3, (1,)),
)


def image(*shape):
    return torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)


def case(name, batch):
    """The layer's tensors, the kernel as a function of the tiling, and cuDNN's way."""
    inner, outer, side, stride, back, second = LAYERS[name]
    arrived = torch.zeros(65536, dtype=torch.int32, device="cuda")
    x = image(batch, inner, side, side)
    if not back:
        weight, bias = image(outer, inner, 3, 3), torch.randn(outer, device="cuda").bfloat16()
        out = side // stride
        z = image(batch, outer, out, out)
        x2 = image(batch, second, 2 * out, 2 * out) if second else None
        w2 = image(outer, second, 1, 1) if second else None

        def ours(tiling):
            how = {"stride": stride, "cut": tiling, "arrived": arrived, "bias": bias, "relu": True}
            if second:
                return conv(x, weight, shortcut=(x2, w2, 2), **how)
            return conv(x, weight, z=z if stride == 1 else None, **how)

        def cudnn():
            if stride == 2:
                return torch.cudnn_convolution_relu(x, weight, bias, (2, 2), (1, 1), (1, 1), 1)
            added = torch.nn.functional.conv2d(x2, w2, None, 2) if second else z
            return torch.cudnn_convolution_add_relu(x, weight, added, 1.0, bias, (1, 1), (1, 1), (1, 1), 1)

        return ours, cudnn
    weight = image(inner, outer, 3, 3)
    y, z = image(batch, outer, side * stride, side * stride), image(batch, outer, side * stride, side * stride)
    x2, w2 = (image(batch, second, side, side), image(second, outer, 1, 1)) if second else (None, None)

    def ours(tiling):
        how = {"stride": stride, "cut": tiling, "arrived": arrived, "y": y}
        return conv_back(x, weight, shortcut=(x2, w2, 2), **how) if second else conv_back(x, weight, z=z, **how)

    def dgrad(g, w, pad):
        only = [True, False, False]
        return torch.ops.aten.convolution_backward(
            g, y, w, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, only
        )[0]

    def cudnn():
        return pointwise.relu_back(dgrad(x2, w2, 0) if second else z, dgrad(x, weight, 1), y)

    return ours, cudnn


def ends(batch):
    """The first layer forward, and back with the step: as the engine did it, and as two kernels."""
    x = torch.rand(129, 3, 32, 32, device="cuda")
    x_adv, weight, bias = x.clone(), image(64, 8, 3, 3), torch.zeros(64, device="cuda").bfloat16()
    rows, numbers = torch.arange(batch, device="cuda"), torch.tensor([0.03, 0.007, 0.0], device="cuda")
    g, step = image(batch, 64, 32, 32), torch.zeros(1, dtype=torch.int64, device="cuda")

    def stem_before():
        pairs = kernels.split(x_adv[rows], 8)
        return torch.cudnn_convolution_relu(pairs, weight, bias, (1, 1), (1, 1), (1, 1), 1)

    def move_before():
        only = [True, False, False]
        like = image(batch, 8, 32, 32) if batch not in likes else likes[batch]
        likes[batch] = like
        back = torch.ops.aten.convolution_backward(
            g, like, weight, None, [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1, only
        )
        gradient = back[0][:, :3].float().contiguous()
        kernels.move(x_adv, x, None, gradient, rows, numbers, step, project=True)

    likes = {}
    ways = {"stem before": stem_before, "move before": move_before}

    def stem(places):
        ends_module._STEM = places
        ends_module.stem(x_adv, rows, weight, bias)

    for places in (64, 128, 256):
        ways[f"stem {places}"] = lambda places=places: stem(places)
    ways["move"] = lambda: ends_module.move_pixels(g, weight, x_adv, x, rows, None, numbers, step, project=True)
    return ways


def tiling_of(name, batch):
    """The engine's choice."""
    inner, outer, side, stride, back, _ = LAYERS[name]
    weight = torch.empty((inner, outer, 3, 3) if back else (outer, inner, 3, 3), device="meta")
    x = torch.empty(batch, inner, side, side, device="meta")
    return conv_module.tiling(x, weight, stride=stride, back=back)


def tilings(name):
    for places, outer, inner, warps, stages, splits in SHAPES:
        if outer <= LAYERS[name][1] and LAYERS[name][0] % inner == 0 and LAYERS[name][5] % inner == 0:
            for split in splits:
                if split == 1 or LAYERS[name][0] >= 128:
                    yield Tiling(places, outer, inner, split, warps, stages)


def compile_some(jobs):
    """One of several processes that fill Triton's cache."""
    for name, tiling in jobs:
        try:
            case(name, 8)[0](tiling)
        except Exception as error:
            print("cannot", name, tiling, repr(error)[:200], flush=True)


def per_launch(work, count=30):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            work()
    times = []
    for _ in range(4):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1000 / count)
    return statistics.median(times[1:])


def main() -> None:
    began = time.perf_counter()
    # One of each compiled kind: what differs only in sizes shares a kernel.
    kinds = ("f64", "f128-down", "f128", "f128-short", "b128", "b128-down", "b64")
    jobs = [(name, tiling) for name in kinds for tiling in tilings(name)]
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=compile_some, args=(jobs[i::15],)) for i in range(15)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    torch.backends.cudnn.benchmark = True
    rows = []
    for batch in BATCHES:
        sums = [0.0, 0.0]
        for name in LAYERS:
            ours, cudnn = case(name, batch)
            wanted = cudnn()
            theirs = per_launch(cudnn)
            times, off = {}, 0.0
            for tiling in tilings(name):
                try:
                    got = ours(tiling)
                    off = max(off, float((got.float() - wanted.float()).norm() / wanted.float().norm()))
                    times[tiling] = per_launch(lambda ours=ours, tiling=tiling: ours(tiling))
                except Exception as error:
                    print("failed", name, batch, tiling, repr(error)[:200], flush=True)
            best = sorted(times, key=times.get)[:3]
            chosen = times.get(tiling_of(name, batch), float("nan"))
            sums[0] += theirs
            sums[1] += min(theirs, *times.values())
            row = {"layer": name, "batch": batch, "cudnn_us": theirs, "error": off}
            row["ours"] = [[t.places, t.outer, t.inner, t.split, t.warps, t.stages, times[t]] for t in times]
            rows.append(row)
            print(
                f"{batch:4} {name:11} cudnn {theirs:6.1f}  chosen {chosen:6.1f}  best "
                + "  ".join(
                    f"{times[t]:6.1f} {t.places}x{t.outer}x{t.inner}/{t.split} w{t.warps} s{t.stages}" for t in best
                )
                + f"  error {off:.4f}",
                flush=True,
            )
        for name, work in ends(batch).items():
            rows.append({"layer": name, "batch": batch, "us": per_launch(work)})
            print(f"{batch:4} {name:16} {rows[-1]['us']:6.1f}", flush=True)
        print(f"batch {batch}: sum cudnn {sums[0]:.0f}, best {sums[1]:.0f}", flush=True)
        with open(sys.argv[1], "w") as file:  # noqa: PTH123
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file)


if __name__ == "__main__":
    main()
