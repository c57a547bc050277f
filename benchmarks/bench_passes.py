"""One forward and one backward pass to the pixels of the folded ResNet-18 in bf16, at the batch sizes of an evaluation.

    PYTHONPATH=src python3 benchmarks/bench_passes.py OUT.json [--images 256 512 1024 2282 4096]

By autograd on cuDNN's fused convolutions, and by the hand-written passes, whose convolutions go to cuDNN from some
number of places on (`ConvTuning.cudnn_forward`, `cudnn_back`). Microseconds an image: medians of 10 CUDA events around
3 runs, the ways in turn. Random weights and images; needs no data.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.engine.attack.folded import Folded, fold
from sparring.engine.triton import tuning
from sparring.models import build

DEVICE = torch.device("cuda")
ALL, NONE = ((0, 0),), ((0, 2**62),)
# Where cuDNN runs a convolution without a shortcut: (rounds of the sum, places), the first row that has the rounds. 64,
# 128, 256 and 512 channels are 9, 18, 36 and 72 rounds.
WAYS: dict[str, dict[str, Any]] = {
    "as tuned": {},
    "cuDNN back, 128 channels and more": {"cudnn_back": ((18, 0), (0, 2**62))},
    "cuDNN back, all": {"cudnn_back": ALL},
    "cuDNN back, all, strides too": {"cudnn_back": ALL, "cudnn_back_strided": ALL},
    "no cuDNN": {"cudnn_forward": NONE, "cudnn_forward_strided": NONE, "cudnn_back": NONE},
}


def by_autograd(network: Folded, x: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward pass alone, and both."""

    def forward() -> Tensor:
        with torch.no_grad():
            return network(x)

    def both() -> Tensor:
        point = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(network(point).logsumexp(1).sum(), point)[0]

    return forward, both


def by_hand(network: Folded, x: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same by the hand-written passes."""
    manual: Any = network.manual
    rows = torch.arange(len(x), device=DEVICE)

    def both() -> Tensor:
        logits, values = manual.forward(x, rows)
        back: Tensor = manual.to_pixels(manual.back(logits.softmax(1), values))
        return back

    return lambda: manual.forward(x, rows)[0], both


def microseconds(work: Callable[[], Any], images: int) -> float:
    """Of one image."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(3):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / 3 / images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[256, 512, 1024, 2282, 4096])
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = build("resnet18", num_classes=10).to(DEVICE)
    with torch.no_grad():
        model.train()(torch.rand(256, 3, 32, 32, device=DEVICE))
    network = fold(model.eval(), dtype=torch.bfloat16, fused=True, fine=True)
    plain = fold(model, dtype=torch.bfloat16, fused=True, fine=True, without=("manual",))
    tuned = tuning.of(DEVICE)
    rows = []
    for images in given.images:
        x = torch.rand(images, 3, 32, 32, device=DEVICE)
        ways = {"autograd": (tuned, by_autograd(plain, x))}
        ways |= {
            name: (replace(tuned, conv=replace(tuned.conv, **how)), by_hand(network, x)) for name, how in WAYS.items()
        }
        expected, times = by_autograd(plain, x)[1](), {name: ([], []) for name in ways}
        for turn in range(12):  # the first two choose and compile
            for name, (numbers, works) in ways.items():
                tuning.of = lambda device, numbers=numbers: numbers  # type: ignore[assignment]
                for work, found in zip(works, times[name], strict=True):
                    took = microseconds(work, images)
                    if turn >= 2:
                        found.append(took)
                if turn == 0:
                    like = F.cosine_similarity(works[1]().flatten(1), expected.flatten(1)).mean()
                    assert like > 0.98, f"{name}: another gradient ({like:.3f})"
        for name, (forward, both) in times.items():
            rows.append({"images": images, "way": name, "forward": statistics.median(forward)})
            rows[-1]["both"] = statistics.median(both)
            print(
                f"{images:5} {name:36} forward {rows[-1]['forward']:.3f} us, both {rows[-1]['both']:.3f} us", flush=True
            )
    about = {
        "command": "python3 benchmarks/bench_passes.py OUT.json",
        "what": "microseconds an image, medians of 10 CUDA events around 3 runs; `both`: forward and backward pass",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    given.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
