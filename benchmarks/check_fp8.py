"""The attack on a wide ResNet in eight bits beside bf16, on one GPU and in one process: speed and results.

    PYTHONPATH=src python3 benchmarks/check_fp8.py OUT.json [--model wrn-34-10] [--train 100] [--profile FILE]

A model is trained by FAT in bf16 on synthetic images that can be learnt. Then, on new images and with the same weights:
times of attack steps and of batches with their updates; logits and signs of the input gradient against fp32; what PGD
leaves, judged in fp32; back-propagations of FAT; and that an attack repeats bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.engine import Engine, prepare
from sparring.engine.cuda_graphs import reason
from sparring.models import build
from sparring.objectives import FAT, KTauPGD

BATCH, SHAPE, CLASSES, EPS = 128, (3, 32, 32), 10, 8 / 255
DEVICE = torch.device("cuda")
BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.1f} s] {text}", flush=True)


class Images:
    """A smooth pattern for every class, shifted, in noise."""

    def __init__(self) -> None:
        self.draw = torch.Generator(DEVICE).manual_seed(0)
        coarse = torch.randn(CLASSES, 3, 8, 8, device=DEVICE, generator=self.draw)
        self.patterns = F.interpolate(coarse, SHAPE[1:], mode="bicubic", align_corners=False)

    def __call__(self, count: int = BATCH) -> tuple[Tensor, Tensor]:
        y = torch.randint(CLASSES, (count,), device=DEVICE, generator=self.draw)
        shift = torch.randint(-3, 4, (2,), generator=self.draw, device=DEVICE).tolist()
        noise = torch.randn(count, *SHAPE, device=DEVICE, generator=self.draw)
        x = 0.5 + 0.07 * self.patterns[y].roll(shift, (2, 3)) + 0.1 * noise
        return x.clamp(0, 1), y


def engine_of(model: nn.Module, *, fp8: bool) -> tuple[Engine, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    how: dict[str, Any] = {"batch": BATCH, "shape": SHAPE, "classes": CLASSES, "device": DEVICE, "half": True}
    return prepare(model, optimizer, FAT().loss, kind="fast", fp8=fp8, **how), optimizer


def search(**changes: Any) -> KTauPGD:
    given: dict[str, Any] = {"eps": EPS, "step_size": 0.007, "steps": 10, "tau": 0, "loss": "ce", "start": "uniform"}
    return KTauPGD(**(given | changes))


def attacked(engine: Engine, pgd: KTauPGD, x: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    found = engine.attack(pgd, x, y, torch.Generator(DEVICE).manual_seed(seed))
    return found.x_adv.clone(), found.backprops.clone()


def milliseconds(work: Callable[[], object], *, repeats: int = 11, inner: int = 4) -> float:
    """The median of CUDA events around `inner` runs."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times)


def step_times(engines: dict[str, Engine], images: Images) -> list[dict[str, float]]:
    """Attack steps by the number of images, the two in turn."""
    x, y = images()
    captured = {name: engine.runner.capture(search()) for name, engine in engines.items() if engine.runner is not None}
    rows = []
    for size in sorted(next(iter(captured.values())).steps, reverse=True):
        row = {"images": float(size)}
        for name, pgd in captured.items():
            pgd.active.begin(x, y, x, tau=10, eps=EPS, step_size=0.001)
            row[name] = milliseconds(pgd.steps[size])
            pgd.taken = int(pgd.active.serial.item())
        row["ratio"] = row["bf16"] / row["fp8"]
        say(f"step of {size:3}: bf16 {row['bf16']:.3f} ms, fp8 {row['fp8']:.3f} ms, {row['ratio']:.3f} times faster")
        rows.append(row)
    return rows


def batch_times(engines: dict[str, Engine], images: Images) -> list[dict[str, float]]:
    """Batches with their updates (of rate 0), and the refreshing of the attack's weights alone."""
    batches = [images() for _ in range(6)]
    rows = []
    for tau in (10, 0):
        row: dict[str, float] = {"tau": tau}
        for name, engine in engines.items():
            number = iter(range(10_000))
            taken = torch.zeros((), device=DEVICE)

            def one(engine: Engine = engine, number: Any = number, taken: Tensor = taken, tau: int = tau) -> None:
                index = next(number)
                x, y = batches[index % len(batches)]
                found = engine.attack(search(tau=tau), x, y, torch.Generator(DEVICE).manual_seed(index))
                taken.add_(found.backprops.float().mean())
                engine.update(x, found.x_adv, y, 0.0)

            row[name] = milliseconds(one, repeats=3, inner=6)
            row[f"{name}_backprops"] = taken.item() / next(number)
        row["ratio"] = row["bf16"] / row["fp8"]
        say(f"batch at tau {tau}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
        rows.append(row)
    for name, engine in engines.items():
        say(f"refresh, {name}: {milliseconds(engine.refresh, repeats=5):.3f} ms")
    return rows


def gradients(network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    point = x.clone().requires_grad_()
    logits = network(point).float()
    return logits.detach(), torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), point)[0]


def exactness(model: nn.Module, engines: dict[str, Engine], images: Images) -> dict[str, Any]:
    """Logits and input gradients against fp32 without TF32."""
    model.eval()
    x, y = images()
    exact, their_gradient = gradients(model, x, y)
    found: dict[str, Any] = {"n": len(x), "natural": float((exact.argmax(1) == y).float().mean())}
    say(f"natural accuracy in fp32 {found['natural']:.3f}")
    for name, engine in engines.items():
        logits, gradient = gradients(engine.gradients, x, y)
        cosine = F.cosine_similarity(gradient.flatten(1), their_gradient.flatten(1))
        row = {
            "logits": float((logits - exact).norm() / exact.norm()),
            "same_class": float((logits.argmax(1) == exact.argmax(1)).float().mean()),
            "cosine": float(cosine.mean()),
            "cosine_least": float(cosine.min()),
            "signs": float((gradient.sign() == their_gradient.sign()).float().mean()),
        }
        found[name] = row
        say(f"against fp32, {name}: " + ", ".join(f"{key} {value:.4f}" for key, value in row.items()))
    return found


def attacks(model: nn.Module, engines: dict[str, Engine], images: Images) -> dict[str, Any]:
    """What PGD-10 leaves, in fp32 verdicts, and FAT's back-propagations."""
    model.eval()
    batches = [images() for _ in range(4)]
    found: dict[str, Any] = {"n": BATCH * len(batches)}
    for name, engine in engines.items():
        with torch.no_grad():
            right = [
                float((model(attacked(engine, search(tau=10), x, y, seed)[0]).argmax(1) == y).float().mean())
                for seed, (x, y) in enumerate(batches)
            ]
        found[f"pgd10_{name}"] = statistics.mean(right)
    say("PGD-10 leaves " + ", ".join(f"{name} {found[f'pgd10_{name}']:.4f}" for name in engines))
    pgd = search(tau=10)
    right = []
    for seed, (x, y) in enumerate(batches[:1]):
        plain = pgd(model, x, y, torch.Generator(DEVICE).manual_seed(seed)).x_adv
        with torch.no_grad():
            right.append(float((model(plain).argmax(1) == y).float().mean()))
    found["pgd10_fp32_first_batch"] = statistics.mean(right)
    say(f"PGD-10 in fp32 leaves {found['pgd10_fp32_first_batch']:.4f} of the first batch")
    for tau in (0, 1, 3):
        counts = {
            name: torch.cat([attacked(engine, search(tau=tau), x, y, seed)[1] for seed, (x, y) in enumerate(batches)])
            for name, engine in engines.items()
        }
        means = {name: float(count.float().mean()) for name, count in counts.items()}
        same = float((counts["bf16"] == counts["fp8"]).float().mean())
        found[f"tau_{tau}"] = means | {"same": same}
        say(f"back-propagations at tau {tau}: {means}, the same for {same:.4f} of the images")
    return found


def repeats(engines: dict[str, Engine], images: Images) -> dict[str, dict[str, bool]]:
    """Whether the same bits come out several times: of logits and gradients (not captured), and of whole attacks."""
    found: dict[str, dict[str, bool]] = {}
    for name, engine in engines.items():
        found[name] = {}
        for count in (BATCH, BATCH * 3 // 4, BATCH // 3):
            x, y = images(count)
            passes = [gradients(engine.gradients, x, y) for _ in range(20)]
            early, late = ([attacked(engine, search(tau=tau), x, y, 5) for _ in range(5)] for tau in (1, 10))
            for what, several in (("passes", passes), ("attacks at tau 1", early), ("attacks at tau 10", late)):
                same = (torch.equal(a, b) for one in several[1:] for a, b in zip(several[0], one, strict=True))
                found[name][f"{what} of {count}"] = all(same)
    say(f"the same bits again: {found}")
    return found


def profile(engines: dict[str, Engine], images: Images, path: Path) -> None:
    """Kernels of a full step by time."""
    x, y = images()
    lines = []
    for name, engine in engines.items():
        assert engine.runner is not None
        pgd = engine.runner.capture(search())
        pgd.active.begin(x, y, x, tau=10, eps=EPS, step_size=0.001)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(3):
                pgd.steps[BATCH]()
            torch.cuda.synchronize()
        pgd.taken = int(pgd.active.serial.item())
        lines += [name, found.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90)]
    path.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="wrn-34-10")
    parser.add_argument("--train", type=int, default=100, help="batches of FAT before anything is measured")
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "command": f"python3 benchmarks/check_fp8.py OUT.json --model {given.model}",
        "n": "each time the median of 11 CUDA events around 4 replays (batches: 3 around 6); images: synthetic",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": given.model,
    }
    model, images = build(given.model, num_classes=CLASSES).to(DEVICE), Images()
    with torch.no_grad():
        model.train()(images()[0])
    engines: dict[str, Engine] = {}
    for name in ("fp8", "bf16"):
        engines[name], _ = engine_of(model, fp8=name == "fp8")
        found[f"line_{name}"] = engines[name].line
        say(f"{name}: {engines[name].line}")
        if name == "fp8" and "in fp8" not in engines[name].line:
            raise SystemExit("nothing to measure: the attack does not run in fp8")
    parts: dict[str, Callable[[], Any]] = {
        "steps": lambda: step_times(engines, images),
        "batches": lambda: batch_times(engines, images),
        "begun": lambda: exactness(model, engines, images),
        "trained": lambda: trained(model, engines, images, given.train),
        "exactness": lambda: exactness(model, engines, images),
        "attacks": lambda: attacks(model, engines, images),
        "repeats": lambda: repeats(engines, images),
        "profile": lambda: profile(engines, images, given.profile) if given.profile else None,
    }
    for name, part in parts.items():
        try:
            with engines["fp8"].tuned():
                found[name] = part()
        except Exception as error:
            traceback.print_exc()
            found[name] = f"failed: {reason(error)}"
            say(f"{name} failed: {reason(error)}")
        given.out.write_text(json.dumps(found, indent=1))
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    say(f"peak {found['peak_gib']:.2f} GiB; engines at the end: {engines['fp8'].line}")
    given.out.write_text(json.dumps(found, indent=1))


def trained(model: nn.Module, engines: dict[str, Engine], images: Images, batches: int) -> float:
    """Train in bf16 by FAT, and let the network in eight bits read the weights."""
    loss = torch.zeros((), device=DEVICE)
    model.train()
    for index in range(batches):
        x, y = images()
        x_adv, _ = attacked(engines["bf16"], search(tau=min(3, index // 20)), x, y, index)
        # The rate ends near 0, so that running statistics are those of the weights.
        rate = 0.05 * min(1.0, (index + 1) / 20, 2 * (batches - index) / batches)
        loss = engines["bf16"].update(x, x_adv, y, rate)
    engines["fp8"].refresh()
    say(f"trained on {batches} batches, the last loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
