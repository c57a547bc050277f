"""Check on one GPU that networks of all kinds train on the fast engine, in L-infinity and L2, and print what it took.

    PYTHONPATH=src python3 benchmarks/check_networks.py [OUT.json]

Networks as users bring them (a vision transformer, a ConvNeXt, timm's where it is installed, dropout) and ones that the
engine cannot run in full (host syncs, control flow). Each takes some steps of FAT with engine "auto". Asserted: the
loss is finite and falls, the attack finds what the plain attack finds (up to bf16), random numbers and memory still
work after a failed capture, and the line says why. A network that fails is printed, and the next one runs.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from sparring.engine import on, prepare
from sparring.models import build
from sparring.objectives import FAT, KTauPGD

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, STEPS = (128, 60) if DEVICE.type == "cuda" else (16, 24)
DIFFERENT = 4  # batches, which come again and again
PGD = {
    "linf": KTauPGD(eps=8 / 255, step_size=0.007, steps=10, tau=0, loss="ce", start="uniform"),
    "l2": KTauPGD(eps=0.5, step_size=0.1, steps=10, tau=0, loss="ce", start="uniform", norm="l2"),
}


class Blocks(nn.Module):
    """A small network of three convolutions with batch-norm."""

    def __init__(self, padding: int | str = 1) -> None:
        super().__init__()
        widths = (3, 64, 64, 128)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=padding, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.fc = nn.Linear(128, 10)

    def features(self, x):
        """What the last layer reads."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return x.mean((2, 3))

    def forward(self, x):
        """Logits."""
        return self.fc(self.features(x))


class Syncs(Blocks):
    """Its forward waits for the device, where a tracer sees it."""

    def forward(self, x):
        """Logits."""
        h = self.features(x)
        return self.fc(h * (1.0 + 0.0 * float(h.detach().abs().amax())))


class SyncsInGraph(Blocks):
    """Its forward waits for the device, where a tracer does not see it."""

    def forward(self, x):
        """Logits."""
        h = self.features(x)
        return self.fc(h * (1.0 + 0.0 * h.detach().abs().amax().item()))


class Branches(Blocks):
    """Control flow that depends on the data."""

    def forward(self, x):
        """Logits."""
        return super().forward(x if torch.isfinite(x).all() else x.nan_to_num())


class Transformed(nn.Module):
    """Patches, LayerNorm and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 128, 4, stride=4), nn.LayerNorm(128)
        self.mix, self.fc = nn.Linear(128, 128), nn.Linear(128, 10)

    def forward(self, x):
        """Logits."""
        h = self.patches(x).flatten(2).transpose(1, 2)
        return self.fc((h + F.gelu(self.mix(self.norm(h)))).mean(1))


class Attends(nn.Module):
    """A small vision transformer: a class token, two blocks of attention, LayerNorm, GELU."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.02 * torch.randn(1, 65, width))
        given = {"dim_feedforward": 2 * width, "dropout": 0.0, "activation": F.gelu, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, norm_first=True, **given) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        """Logits."""
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, 0])


class NextBlock(nn.Module):
    """A block of ConvNeXt: depthwise convolution, LayerNorm over the channels, GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """The input and what the block adds."""
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(h))).permute(0, 3, 1, 2)


def next_like() -> nn.Module:
    """A small ConvNeXt."""
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 10))
    return nn.Sequential(nn.Conv2d(3, 64, 4, stride=4), NextBlock(64), NextBlock(64), *pooled)


class DropsOnly(Blocks):
    """Dropout, and nothing else that is unusual: a captured update draws anew at every replay."""

    def forward(self, x):
        """Logits."""
        return self.fc(F.dropout(self.features(x), 0.2, self.training))


class Drops(Branches):
    """The same with dropout, which draws from the generator that a failed capture has used."""

    def forward(self, x):
        """Logits."""
        h = self.features(x if torch.isfinite(x).all() else x.nan_to_num())
        return self.fc(F.dropout(h, 0.1, self.training))


NETWORKS = {
    "resnet18": (lambda: build("resnet18", num_classes=10), "hand-written passes, captured"),
    "resnet18, l2": (lambda: build("resnet18", num_classes=10), "captured"),
    "preact_resnet18": (lambda: build("preact_resnet18", num_classes=10), "captured"),
    "wrn-16-4-silu": (lambda: build("wrn-16-4-silu", num_classes=10), "captured"),
    "vision transformer": (Attends, "captured"),
    "ConvNeXt": (next_like, "captured"),
    "ConvNeXt, l2": (next_like, "captured"),
    "timm resnet50, 64x64": (lambda: build("timm:resnet50", num_classes=10, size=(64, 64)), "captured"),
    "dropout": (DropsOnly, ""),
    "padding same": (lambda: Blocks("same"), "padding='same'"),
    "LayerNorm and GELU": (Transformed, "LayerNorm is not folded"),
    "control flow": (Branches, "data-dependent control flow"),
    "sync": (Syncs, "uncaptured"),
    "sync in the graph": (SyncsInGraph, "uncaptured"),
    "control flow and dropout": (Drops, "uncaptured"),
}


def check(name: str, make, expected: str) -> dict:
    torch.manual_seed(0)
    norm = "l2" if name.endswith("l2") else "linf"
    pgd, side = PGD[norm], 64 if "64x64" in name else 32
    model = make().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    draw = torch.Generator(DEVICE).manual_seed(1)
    teacher = torch.randn(10, 3 * side * side, device=DEVICE, generator=draw)
    images = torch.rand(8, 3, side, side, device=DEVICE, generator=draw)
    began = time.perf_counter()
    engine = prepare(
        *(model, optimizer, FAT().loss),
        batch=BATCH,
        shape=(3, side, side),
        classes=10,
        device=DEVICE,
        half=True,
        images=images,
        norm=norm,
    )
    losses, moved = [], 0.0
    with engine.tuned():
        for step in range(STEPS):
            if step == 3:
                began_steps = time.perf_counter()
            count = BATCH if step % 10 else BATCH * 3 // 5
            again = torch.Generator(DEVICE).manual_seed(step % DIFFERENT)
            x = torch.rand(BATCH, 3, side, side, device=DEVICE, generator=again)[:count]
            y = (x.flatten(1) @ teacher.T).argmax(1)
            model.train()
            found = engine.attack(pgd, x, y, draw)
            losses.append(engine.update(x, found.x_adv, y, 0.01, 0.0).clone())
            shift = (found.x_adv - x).flatten(1)
            moved = max(moved, float(shift.abs().max() if norm == "linf" else shift.norm(dim=1).max()))
    torch.cuda.synchronize() if DEVICE.type == "cuda" else None
    seconds = time.perf_counter() - began_steps
    assert not engine.failed()
    values = torch.stack(losses).float()
    first, last = float(values[:10].mean()), float(values[-10:].mean())
    assert bool(torch.isfinite(values).all()) and last < first, (name, first, last)
    assert 0.5 * pgd.eps < moved <= pgd.eps + 1e-5, (name, moved)
    twin = copy.deepcopy(model).eval()
    seeds = [torch.Generator(DEVICE).manual_seed(3) for _ in range(2)]
    ours = engine.attack(pgd, x, y, seeds[0]).backprops.clone()
    theirs = pgd(twin, x, y, seeds[1]).backprops
    same = float((ours == theirs).double().mean())
    assert same > 0.6, (name, same)
    torch.rand(4, device=DEVICE)  # the default generator is usable
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    line = engine.line
    assert expected in line or DEVICE.type == "cpu", (expected, line)
    row = {"line": line, "first_loss": first, "last_loss": last, "same_backprops": same}
    row |= {"prepared_s": began_steps - began, "step_ms": 1e3 * seconds / (STEPS - 3)}
    print(
        f"{name}: {line}\n  loss {first:.3f} -> {last:.3f}, {same:.1%} of examples take as many steps as in fp32, ",
        end="",
    )
    print(f"{row['step_ms']:.2f} ms a step", flush=True)
    return row


def checked(name: str, make, expected: str) -> dict:
    try:
        return check(name, make, expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    torch._logging.set_logs(all=50)
    with on(DEVICE):
        found = {name: checked(name, *given) for name, given in NETWORKS.items()}
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    result = {"device": device, "torch": torch.__version__, "command": " ".join(sys.argv), "networks": found}
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    failed = [name for name, row in found.items() if "failed" in row]
    print(f"failed: {', '.join(failed)}" if failed else "all networks train")
    sys.exit(bool(failed))
