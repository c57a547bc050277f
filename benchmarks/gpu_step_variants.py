"""Which way to run an attack step is fastest? One GPU, several ways, one table. A tool for docs/performance.md.

PYTHONPATH=src python3 benchmarks/gpu_step_variants.py $OUT/variants.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from sparring import losses
from sparring.engine.fold import fold
from sparring.models import build, forward_flops

torch.backends.cudnn.benchmark = True


def step(net, x, y):
    point = x.detach().requires_grad_()
    loss = losses.cross_entropy(net(point), y).sum()
    (gradient,) = torch.autograd.grad(loss, point)
    return gradient


def captured(net, x, y):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(net, x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(net, x, y)
    return graph, out


def timed(work, repeats=30):
    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        work()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def main() -> None:
    rows = []
    for name, sizes in (("resnet18", (16, 128)), ("wrn-34-10", (16, 128))):
        torch.manual_seed(0)
        model = build(name, num_classes=10).cuda()
        model.train()
        with torch.no_grad():
            model(torch.rand(64, 3, 32, 32, device="cuda"))
        model.eval().to(memory_format=torch.channels_last)
        flops = forward_flops(model, (1, 3, 32, 32))
        ways = {}
        fused = fold(model, dtype=torch.bfloat16, fused=True)
        plain = fold(model, dtype=torch.bfloat16, fused=False)
        exact = fold(model, dtype=torch.float32, fused=False)
        ways["cudnn-fused"] = fused
        ways["compiled-folded"] = torch.compile(plain, dynamic=True)
        ways["compiled-fused"] = torch.compile(fold(model, dtype=torch.bfloat16, fused=True), dynamic=True)

        reference = None
        for way, net in ways.items():
            for size in sizes:
                generator = torch.Generator("cuda").manual_seed(size)
                x = torch.rand(size, 3, 32, 32, device="cuda", generator=generator)
                y = torch.randint(0, 10, (size,), device="cuda", generator=generator)
                began = time.perf_counter()
                try:
                    graph, out = captured(net, x, y)
                except Exception as error:
                    print(name, way, size, "FAILED", repr(error)[:600], flush=True)
                    break
                torch.cuda.synchronize()
                ready = time.perf_counter() - began
                ms = timed(graph.replay)
                reference = step(exact, x, y)
                graph.replay()
                error = ((out - reference).norm() / reference.norm()).item()
                signs = (out.sign() == reference.sign()).float().mean().item()
                rows.append(
                    {
                        "model": name,
                        "way": way,
                        "batch": size,
                        "ms": ms,
                        "tflops": size * flops * 2 / ms / 1e9,
                        "ready_s": ready,
                        "gradient_error": error,
                        "signs_equal": signs,
                    }
                )
                print(
                    f"{name:10} {way:18} {size:4} {ms:7.3f} ms {rows[-1]['tflops']:6.0f} TFLOP/s ready {ready:5.1f} s "
                    f"error {error:.3f} signs {signs:.3f}",
                    flush=True,
                )
    with open(sys.argv[1], "w") as file:  # noqa: PTH123
        json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
