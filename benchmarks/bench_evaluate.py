"""Time of an evaluation, against the published code's procedure and against the AutoAttack package alone, in one run.

Without arguments: a small network on digits, on one CPU core, in about a minute; the ratios count. On a GPU:

    python3 benchmarks/bench_evaluate.py --device cuda --out evaluate.json
    python3 benchmarks/bench_evaluate.py --device cuda --checkpoint RUN --data cifar10 --aa-limit 1000

measures ResNet-18 (random weights and images unless given) on 10,000 images: the attack step alone for each form of the
bf16 copy, the dat protocol, and AutoAttack. The published procedure (fp32, batches of 128, backward() through the
weights too) is timed on `--authors-limit` images and scaled up. With random weights AutoAttack runs at an eps so small
that nothing breaks: every part then works on every image, the longest case. torch's TF32 switches keep their values for
the package alone; our verdicts are without TF32.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pyautoattack import AutoAttack
from torch import Tensor, nn

from sparring import data, models
from sparring.attacks import pgd
from sparring.attacks.eval_mode import eval_mode, frozen
from sparring.evaluation import evaluate
from sparring.evaluation.gradient_model import gradient_model
from sparring.evaluation.protocols import find, unique_attacks
from sparring.evaluation.starts import pgd_from
from sparring.weights import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data", help="cifar10, digits, ...; random images unless given (digits on the CPU)")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--n", type=int, help="images of the dat protocol")
    parser.add_argument("--authors-limit", type=int, help="images of the published procedure")
    parser.add_argument("--aa-limit", type=int, help="images of AutoAttack; 0 skips it")
    parser.add_argument("--eps", type=float, help="of AutoAttack")
    parser.add_argument(
        "--forms",
        nargs="*",
        default=["fp32", "bf16"],
        help="fp32, bf16, bf16-compiled",
    )
    parser.add_argument("--aa-only", action="store_true", help="AutoAttack alone, ours against the package")
    parser.add_argument("--precisions", nargs="*", help="of our AutoAttack; fp32 and bf16, with --aa-only bf16")
    parser.add_argument("--package-limit", type=int, help="images of the package alone; as many as ours unless given")
    parser.add_argument("--package-batch", type=int, nargs="*", default=[250], help="250 is its default")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    logging.getLogger("sparring.evaluation.autoattack").setLevel(logging.DEBUG)
    logging.basicConfig(format="%(message)s")
    device = torch.device(asked.device)
    gpu = device.type == "cuda"
    if not gpu:
        torch.set_num_threads(1)  # such small tensors are slower with more
    n = asked.n or (10_000 if gpu else 200)
    aa_limit = asked.aa_limit if asked.aa_limit is not None else (512 if gpu else 8)
    model, x, y = subject(asked, device, n)
    untrained = asked.checkpoint is None and gpu
    eps = asked.eps or (1e-5 if untrained else 8 / 255 if gpu else 0.15)

    report: dict[str, Any] = {"hardware": hardware(device), "n": len(x), "shape": list(x.shape[1:])}
    if not asked.aa_only:
        report["step_microseconds_per_image"] = steps(model, x, y, asked.forms)
        report["dat"] = dat(
            model, x, y, asked.authors_limit or (1280 if gpu else 128), compiled="bf16-compiled" in asked.forms
        )
    if aa_limit:
        precisions = tuple(asked.precisions or (("bf16",) if asked.aa_only else ("fp32", "bf16")))
        limit = min(asked.package_limit or aa_limit, aa_limit)
        report["autoattack"] = {}
        for found in autoattack(model, x[:aa_limit], y[:aa_limit], eps, precisions, limit, asked.package_batch):
            report["autoattack"] |= found
            print(found, flush=True)
            if asked.out:  # the longest part: write what is done
                asked.out.write_text(json.dumps(report, indent=1))
    text = json.dumps(report, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text)


def subject(asked: argparse.Namespace, device: torch.device, n: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model and uint8 images; the labels of random images are the model's own."""
    spec = asked.data or (None if device.type == "cuda" else "digits")
    images = data.load(spec) if spec else None
    if asked.checkpoint:
        model = load_model(asked.checkpoint, device=device)
    elif spec == "digits":
        model = trained(images.train)
    else:
        torch.manual_seed(0)
        model = models.build(asked.model, num_classes=10).to(device).eval()
    if images:
        return model, images.test.x[:n], images.test.y[:n]
    x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model, x, torch.cat([model(part.to(device) / 255).argmax(1) for part in x.split(1000)]).cpu()


def trained(split: data.Split) -> nn.Module:
    """A small network after a few seconds of adversarial training."""
    torch.manual_seed(0)
    model = models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        rows = torch.randint(0, len(split), (64,), generator=generator)
        x, y = split.x[rows] / 255, split.y[rows]
        x_adv = pgd(model, x, y, eps=0.15, step_size=0.1, steps=2, generator=generator)
        model.train()
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(x_adv), y).backward()
        optimiser.step()
    return model.eval()


def steps(model: nn.Module, x: Tensor, y: Tensor, forms: list[str]) -> dict[str, float]:
    """One attack step per image: the least of three runs of 10 steps on one batch."""
    device = next(model.parameters()).device
    size = min(len(x), 2048 if device.type == "cuda" else 300)
    images, labels = (x[:size].to(device) / 255).contiguous(), y[:size].to(device)
    found = {}
    with eval_mode(model), frozen(model):
        for form in forms:
            fast = gradient_model(
                model,
                images[:16],
                precision="fp32" if form == "fp32" else "bf16",
                compiled=form == "bf16-compiled",
            )

            def run(fast: Any = fast) -> None:
                pgd_from(fast, images, labels, start=images, eps=0.03, step_size=0.01, steps=10, loss="ce")

            first = timed(run, device)  # with compilation
            found[form] = min(timed(run, device) for _ in range(3)) / 10 / size * 1e6
            found[f"{form}-first-run-seconds"] = first
    return found


def dat(model: nn.Module, x: Tensor, y: Tensor, limit: int, *, compiled: bool) -> dict[str, float]:
    """The dat protocol by this package and by the published procedure: 151 gradient steps an image."""
    device = next(model.parameters()).device
    found = {}
    evaluate(model, x[:64], y[:64], "quick", precision="bf16", doubts=False)  # initialises libraries
    for precision in ("fp32", "bf16"):
        ours: list[Any] = []
        found[f"ours-{precision}-seconds"] = timed(
            lambda p=precision, o=ours: o.append(evaluate(model, x, y, "dat", precision=p, doubts=False)), device
        )
        found |= {f"ours-{precision}-{record.name}": record.accuracy for record in ours[0]}
    if compiled:
        found["ours-compiled-seconds"] = timed(
            lambda: evaluate(model, x, y, "dat", precision="bf16", doubts=False, compiled=True), device
        )
    small = min(limit, len(x))
    found["authors-seconds"] = timed(lambda: authors(model, x[:small], y[:small]), device) * len(x) / small
    for precision in ("fp32", "bf16"):
        found[f"times-faster-{precision}"] = found["authors-seconds"] / found[f"ours-{precision}-seconds"]
    return found


def authors(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The procedure of the published code, reimplemented: batches of 128, fp32, every attack on its own."""
    device = next(model.parameters()).device
    for attack in unique_attacks(find("dat")):
        s = attack.settings
        for images, labels in zip(x.split(128), y.split(128), strict=True):
            natural, label = images.to(device).float() / 255, labels.to(device)
            x_adv = (natural + torch.empty_like(natural).uniform_(-s.eps, s.eps)).clamp(0, 1)
            for _ in range(s.steps):
                x_adv.requires_grad_()
                model.zero_grad()
                F.cross_entropy(model(x_adv), label, reduction="sum").backward()
                moved = x_adv.detach() + s.step_size * x_adv.grad.sign()
                x_adv = torch.min(torch.max(moved, natural - s.eps), natural + s.eps).clamp(0, 1)
            (model(x_adv).argmax(1) == label).sum().item()
    model.zero_grad()


def autoattack(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, precisions: tuple[str, ...], limit: int, sizes: list[int]
) -> Iterator[dict[str, Any]]:
    """AutoAttack standard: ours on all, the package alone on the first `limit`, in batches of each size.

    The package works batch by batch, so its time grows with their number; `-scaled` is its time times all over limit.
    Its accuracy is reported beside ours on the same images, and how many verdicts differ in either direction.
    """
    device = next(model.parameters()).device
    yield {"n": len(x), "eps": eps, "package-n": limit}
    seconds, records = {}, {}
    for precision in precisions:
        ours: list[Any] = []
        seconds[precision] = timed(
            lambda p=precision, o=ours: o.append(
                evaluate(model, x, y, "autoattack", eps=eps, precision=p, doubts=False)
            ),
            device,
        )
        records[precision] = record = ours[0]["autoattack"]
        yield {
            f"ours-{precision}-seconds": seconds[precision],
            f"ours-{precision}-accuracy": record.accuracy,
            f"ours-{precision}-accuracy-on-package-n": float(record.correct[:limit].double().mean()),
            f"ours-{precision}-detail": record.detail,
        }
    images, labels = x[:limit].to(device).float() / 255, y[:limit].to(device)
    for size in sizes:
        right: list[Tensor] = []

        def package(size: int = size, right: list[Tensor] = right) -> None:
            suite = AutoAttack(model, eps=eps, device=device, seed=0)
            x_adv, _ = suite.run_standard_evaluation(images, labels, batch_size=size)
            with torch.no_grad():
                pairs = zip(x_adv.split(250), labels.split(250), strict=True)
                right.extend(model(a).argmax(1) == b for a, b in pairs)

        took = timed(package, device)
        model.zero_grad()
        scaled, theirs = took * len(x) / limit, torch.cat(right).cpu()
        found = {
            f"package-{size}-seconds": took,
            f"package-{size}-accuracy": float(theirs.double().mean()),
            f"package-{size}-scaled": scaled,
        }
        for precision, record in records.items():
            ours_alone = record.correct[:limit] & ~theirs
            found[f"times-faster-{precision}-than-{size}"] = scaled / seconds[precision]
            found[f"withstand-{precision}-alone"] = int(ours_alone.sum())
            found[f"withstand-package-{size}-but-not-{precision}"] = int((theirs & ~record.correct[:limit]).sum())
        yield found


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds, including work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def hardware(device: torch.device) -> dict[str, str]:
    """The device, torch's version and the TF32 switches."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    tf32 = f"matmul {torch.get_float32_matmul_precision()}, cudnn {torch.backends.cudnn.allow_tf32}"
    return {"device": name, "torch": str(torch.__version__), "tf32": tf32}


if __name__ == "__main__":
    main()
