"""The public contract, as a caller writes it: every name and call that others may rely on.

mypy --strict checks this file with the sources (`make types`); tests/test_contract.py runs it on small data.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparring

Loader = DataLoader[tuple[Tensor, ...]]


def attacks(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attacks, on any nn.Module from pixels in [0, 1] to logits."""
    x_adv = sparring.pgd(model, x, y, eps=8 / 255, step_size=2 / 255, steps=20, norm="linf", loss="ce", start="uniform")
    found = sparring.friendly_pgd(model, x, y, eps=8 / 255, step_size=0.007, steps=10, tau=0)
    return x_adv, found.x_adv, found.backprops


def own_loop(model: nn.Module, loader: Loader, optimizer: torch.optim.Optimizer, epochs: int) -> Tensor:
    """Friendly training in the caller's own loop."""
    fat = sparring.FAT(eps=8 / 255, step_size=0.007, steps=10, tau="0,1@40%,2@75%")
    backprops = torch.zeros(())
    for epoch in range(epochs):
        for x, y in loader:
            step = fat(model, x, y, progress=epoch / epochs)
            optimizer.zero_grad()
            step.loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            optimizer.step()
            backprops += step.backprops.sum()
    return backprops


def package_loop(net: nn.Module, train_loader: Loader, test_loader: Loader, folder: Path) -> list[nn.Module]:
    """The package's loop: a recipe, everything the caller's own, fine-tuning."""
    fat = sparring.FAT(eps=0.3, step_size=0.075, steps=2, tau=0)
    recipe = sparring.train("fat-digits", out=folder / "a", epochs=1)
    own = sparring.train(
        objective=fat,
        model=net,
        data=(train_loader, test_loader),
        out=folder / "b",
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        epochs=1,
        validation=20,
    )
    tuned = sparring.train("fat-digits", out=folder / "c", init=folder / "a", epochs=1)
    return [recipe, own, tuned]


def evaluation(model: nn.Module, x: Tensor, y: Tensor, path: Path) -> tuple[float, float, int]:
    """Robustness that can be believed: attacks by name, the worst case, the doubts, a file."""
    result = sparring.evaluate(model, x, y, protocol=("quick", "mart"), eps=0.3)
    result.save(path)
    return result["pgd20"].accuracy, result.worst_case.accuracy, len(result.doubts)


def evaluation_of_data(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """The same on a DataLoader, on (x, y) and on a data set by its name."""
    by_loader = sparring.evaluate(model, loader, protocol="quick", eps=0.3, limit=10)
    by_name = sparring.evaluate(model, "digits", protocol="quick", eps=0.3, limit=10)
    return by_loader.worst_case.accuracy + by_name.worst_case.accuracy


def loading(folder: Path, net: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A run folder, and one whose network was the caller's own."""
    return sparring.load_model(folder / "a"), sparring.load_model(folder / "b", model=net)


def registering() -> None:
    """A network by a name of one's own."""

    def make(num_classes: int, channels: int, size: tuple[int, int]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * size[0] * size[1], num_classes))

    sparring.register_model("contract-net", make)


OBJECTIVES = (
    sparring.Standard,
    sparring.Madry,
    sparring.FAT,
    sparring.TRADES,
    sparring.FATForTRADES,
    sparring.MART,
    sparring.FATForMART,
    sparring.CAT,
    sparring.DAT,
    sparring.ATES,
)
ERRORS = (sparring.UserError, sparring.RunFailed)
CONFIG: sparring.Config = sparring.Config(objective=sparring.FAT(tau=2), epochs=1)
PAIRS = TensorDataset  # what the tests build their loaders from
