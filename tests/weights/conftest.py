"""Networks and run folders for the tests of loading and exporting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparring import models
from sparring.training import checkpoint
from tests.peers import PeerResNet18, PeerWRN

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2471, 0.2435, 0.2616]
TINY = {"num_classes": 10, "channels": 1, "size": (8, 8)}


def stirred(model: nn.Module) -> nn.Module:
    """Random batch-norm statistics, so that a lost one changes the output."""
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model.eval()


@pytest.fixture(scope="module")
def peer_wrn() -> PeerWRN:
    torch.manual_seed(0)
    return stirred(PeerWRN(16, 2, sub_block1=True))


@pytest.fixture(scope="module")
def peer_resnet() -> PeerResNet18:
    torch.manual_seed(1)
    return stirred(PeerResNet18())


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def tiny() -> nn.Module:
    torch.manual_seed(2)
    return stirred(models.build("tiny_cnn", **TINY))


def described(
    name: str, num_classes: int, channels: int, size: tuple[int, int], normalize: Any = None
) -> dict[str, Any]:
    return {
        "name": name,
        "num_classes": num_classes,
        "channels": channels,
        "size": list(size),
        "normalize": normalize,
    }


def write_run(folder: Path, model: nn.Module, **model_facts: Any) -> Path:
    """A run folder as training writes it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for which in ("last", "best"):
        tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
        tensors |= {f"momentum.{key}": torch.zeros_like(value) for key, value in model.named_parameters()}
        if which == "best":
            tensors["model.fc.bias"] = tensors["model.fc.bias"] + 1
        checkpoint.save(
            folder / f"{which}.safetensors",
            tensors,
            {"model": model_facts, "data": "digits", "epoch": 3, "recipe": "fat"},
        )
    return folder


def same(left: nn.Module, right: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(left(x), right(x), rtol=1e-5, atol=1e-5)
