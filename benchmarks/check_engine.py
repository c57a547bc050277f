"""Check of the fast engine on one GPU against the plain path, fp32 and eager autocast, on synthetic images.

    PYTHONPATH=src python3 benchmarks/check_engine.py OUT.json

Checks captured updates, hand-written passes, the step in two graphs, captured gradients of an evaluation, and data and
back-propagation counts in fp32. What must hold exactly is asserted; the rest is printed and written. For speed:
`sparring bench`.
"""

from __future__ import annotations

import copy
import json
import sys
import time

import torch

from sparring.engine import PlainUpdate, prepare
from sparring.engine.attack.folded import fold
from sparring.engine.attack.replay import Replayed
from sparring.models import build
from sparring.objectives import FAT, KTauPGD

BATCH, SHAPE, STEPS = 128, (3, 32, 32), 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made(name: str, half: bool, without: tuple[str, ...] = ()):
    torch.manual_seed(0)
    # Some examples fool a linear model at every step: the active set shrinks step by step.
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    model = (linear if name == "linear" else build(name, num_classes=10)).to(DEVICE)
    with torch.no_grad():
        model.train()(torch.rand(256, *SHAPE, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=2e-4)
    began = time.perf_counter()
    engine = prepare(
        model,
        optimizer,
        FAT().loss,
        batch=BATCH,
        shape=SHAPE,
        classes=10,
        device=DEVICE,
        half=half,
        kind="fast",
        rehearse=half,
        without=without,
    )
    return model, engine, began


def batch(model, seed: int, wrong: float = 0.1):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.rand(BATCH, *SHAPE, device=DEVICE, generator=generator)
    with torch.no_grad():
        y = model.eval()(x).argmax(dim=1)
    flip = torch.rand(BATCH, device=DEVICE, generator=generator) < wrong
    model.train()
    return x, torch.where(flip, (y + 1) % 10, y)


def search(**changes) -> KTauPGD:
    given = {"eps": 8 / 255, "step_size": 0.007, "steps": STEPS, "tau": 0, "loss": "ce", "start": "uniform"}
    return KTauPGD(**(given | changes))


def correctness() -> list[dict]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    cases = [
        ("resnet18", "ce", 0, 0.0, 0.0005, True),
        ("resnet18", "ce", 1, 0.001, 0.001, True),
        ("resnet18", "kl", 0, 0.0, 0.001, True),
        ("resnet18", "ce", 10, 0.0, 0.007, True),
        ("linear", "ce", 0, 0.0, 0.002, True),
        ("linear", "ce", 1, 0.001, 0.002, True),
        ("linear", "kl", 0, 0.0, 0.002, True),
        ("linear", "ce", 2, 0.001, 0.002, False),
    ]
    engines = {}
    for name, loss, tau, noise, size, project in cases:
        if name not in engines:
            engines[name] = made(name, half=False)
        model, engine, _ = engines[name]
        x, y = batch(model, seed=1)
        for count in (BATCH, 77):
            pgd = search(loss=loss, tau=tau, noise=noise, step_size=size, project=project)
            x_adv, backprops = attacked(engine, x[:count], y[:count], pgd)
            plain = pgd(model, x[:count], y[:count], torch.Generator(DEVICE).manual_seed(3))
            row = {
                "model": name,
                "project": project,
                "loss": loss,
                "tau": tau,
                "noise": noise,
                "count": count,
                "mean_bps": plain.backprops.double().mean().item(),
                "bps_equal": (backprops == plain.backprops).double().mean().item(),
                "pixels_equal": ((x_adv - plain.x_adv).abs() < 1e-6).double().mean().item(),
                "bincount": torch.bincount(plain.backprops, minlength=STEPS + 1).tolist(),
            }
            rows.append(row)
            print(row, flush=True)
    torch.backends.cudnn.allow_tf32 = True
    return rows


def hand_written(name: str, counts: tuple[int, ...]) -> list[dict]:
    """Relative errors against fp32 of the hand-written passes and of autograd through cuDNN, both in bf16."""
    rows = []
    model, engine, _ = made(name, half=True)
    print(engine.line, flush=True)
    ours, exact = engine.gradients.network, fold(model, dtype=torch.float32, fused=False)
    theirs = fold(model, dtype=torch.bfloat16, fused=True)
    assert ours.manual is not None
    theirs.manual = None
    for count in counts:
        generator = torch.Generator(DEVICE).manual_seed(count)
        x = torch.rand(count, *SHAPE, device=DEVICE, generator=generator)
        output_gradient = torch.randn(count, 10, device=DEVICE, generator=generator)
        found = {}
        for whose, network in (("exact", exact), ("ours", ours), ("theirs", theirs)):
            point = x.clone().requires_grad_()
            logits = network(point)
            (gradient,) = torch.autograd.grad(logits, point, output_gradient)
            found[whose] = logits.detach(), gradient
        row = {"model": name, "images": count}
        for whose in ("ours", "theirs"):
            for what, place in (("logits", 0), ("gradient", 1)):
                off = found[whose][place] - found["exact"][place]
                row[f"{whose}_{what}"] = float(off.norm() / found["exact"][place].norm())
        again = ours(x)
        row["repeatable"] = bool(torch.equal(again, ours(x)))
        rows.append(row)
        print(name, {key: round(value, 4) for key, value in row.items() if key != "model"}, flush=True)
    return rows


def attacked(engine, x, y, pgd) -> tuple[torch.Tensor, torch.Tensor]:
    found = engine.attack(pgd, x, y, torch.Generator(DEVICE).manual_seed(3))
    return found.x_adv.clone(), found.backprops.clone()


def two_graph_step(name: str, *without: str) -> list[dict]:
    """Shares that are equal between bf16 attacks whose first step with stops is two graphs and ones with whole steps.

    Rounding differs where whole steps run in parts (wide ResNets, unless `without` split_batch).
    """
    model, engine, _ = made(name, half=True, without=without)
    x, y = batch(model, seed=1, wrong=0.4)
    rows = []
    for tau, count, size in ((0, BATCH, 0.0005), (2, BATCH, 0.0005), (0, 120, 0.0005), (0, 77, 0.0005)):
        pgd = search(tau=tau, step_size=size)
        x_adv, backprops = attacked(engine, x[:count], y[:count], pgd)
        (captured,) = engine.runner.made.values()
        assert captured.check is not None
        kept, captured.check, engine.runner.halves = captured.check, None, False
        their_x_adv, their_backprops = attacked(engine, x[:count], y[:count], pgd)
        assert captured.check is None
        captured.check, engine.runner.halves = kept, True
        row = {
            "model": name,
            "without": without,
            "tau": tau,
            "count": count,
            "mean_bps": their_backprops.double().mean().item(),
        }
        row["bps_equal"] = (backprops == their_backprops).double().mean().item()
        row["pixels_equal"] = ((x_adv - their_x_adv).abs() < 1e-6).double().mean().item()
        row["stopped_equal"] = bool(torch.equal(x_adv[their_backprops <= tau], their_x_adv[their_backprops <= tau]))
        rows.append(row)
        print(row, flush=True)
    return rows


def updates() -> dict:
    """Relative distance of the weights after captured bf16 updates from eager autocast with torch's SGD.

    Partial batches and weight perturbation (AWP) are among the nine updates.
    """
    model, engine, _ = made("resnet18", half=True)
    update, loss = engine.step, FAT().loss
    assert update.descent.at_once is not None and len(update.amp_copy.copies) == 22
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.0, momentum=0.9, weight_decay=2e-4)

    def cast(m, x, x_adv, y):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss(lambda images: m(images).float(), x, x_adv, y)

    reference = PlainUpdate(theirs, optimizer, cast)
    begin = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    losses = []
    for step, (count, awp) in enumerate([(BATCH, 0.0)] * 5 + [(77, 0.0), (BATCH, 0.005), (77, 0.005), (BATCH, 0.0)]):
        x, y = batch(theirs, seed=step)
        given = x[:count], x[:count], y[:count], 0.01, awp
        losses.append([float(update(*given)), float(reference(*given))])
        for leaf, weight in zip(update.amp_copy.copies, update.amp_copy.weights, strict=True):
            assert torch.equal(leaf, weight.to(torch.bfloat16))  # the copies are the weights, rounded
    assert not update.failed()
    for ours, other in zip(model.buffers(), theirs.buffers(), strict=True):
        assert ours.is_floating_point() or torch.equal(ours, other)  # batch-norm's counts
    flat = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, theirs)]
    before = [tensor.clone() for tensor in (*model.parameters(), *update.amp_copy.copies, *update.descent.state)]
    update(x, x * float("nan"), y, 0.1)
    assert update.failed()
    after = (*model.parameters(), *update.amp_copy.copies, *update.descent.state)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    row = {
        "losses": losses,
        "moved": float((flat[1] - begin).norm() / begin.norm()),
        "apart": float((flat[1] - flat[0]).norm() / begin.norm()),
    }
    print(row, flush=True)
    return row


def replayed() -> list[dict]:
    """Captured gradients against the same launched kernel by kernel: relative distance, and ms of each."""
    _, engine, _ = made("resnet18", half=True)
    theirs = engine.gradients.network
    ours = Replayed(theirs)
    rows = []
    for count in (5, 32, 100, 500, 1000):
        x = torch.rand(count, *SHAPE, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(count))
        row, found = {"images": count}, {}
        for name, network in (("replayed", ours), ("launched", theirs)):
            for repeat in range(30):
                if repeat == 10:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                point = x.clone().requires_grad_()
                logits = network(point)
                (gradient,) = torch.autograd.grad(logits.square().sum(), point)
            torch.cuda.synchronize()
            row[f"{name}_ms"] = 1e3 * (time.perf_counter() - began) / 20
            found[name] = logits.detach(), gradient
        for what, place in (("logits", 0), ("gradient", 1)):
            one, two = found["replayed"][place], found["launched"][place]
            row[f"{what}_apart"] = float((one - two).norm() / two.norm())
        rows.append(row)
        print({key: round(value, 4) for key, value in row.items()}, flush=True)
    return rows


if __name__ == "__main__":
    torch._logging.set_logs(all=50)
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    found["updates"] = updates()
    found["hand_written"] = hand_written("resnet18", (1, 8, 16, 24, 32, 40, 56, 64, 80, 128, 250))
    found["hand_written"] += hand_written("wrn-34-10", (1, 8, 40, 128))
    found["two_graph_step"] = [row for name in ("resnet18", "small_cnn", "wrn-34-10") for row in two_graph_step(name)]
    found["two_graph_step"] += two_graph_step("wrn-34-10", "split_batch")
    found["replayed"] = replayed()
    found["correctness"] = correctness()
    with open(sys.argv[1], "w") as file:  # noqa: PTH123
        json.dump(found, file, indent=1)
