"""Several processes as one run: the run of one process up to rounding, the same weights everywhere, one end for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from sparring.data import Dataset, load
from sparring.data.stream import rows_of
from sparring.objectives import CAT, DAT, FAT, MART, TRADES, FATForTRADES
from sparring.training import loop
from sparring.training.checkpoint import checksum
from sparring.training.config import Config
from sparring.training.distributed import joined
from tests.training import group

SHORT = {"eps": 0.2, "step_size": 0.05, "steps": 3}
BASE = Config(
    objective=FAT(**SHORT, tau=1, noise=0.001),
    data="digits",
    model="tiny_cnn",
    epochs=2,
    batch_size=30,
    validation=20,
    lr=0.1,
    augment="crop-flip",
)
# Of 83 images the last batch has 23, and of 63 it has 3: with three processes two of them get none.
CASES = {
    "fat": (BASE, 83),
    "short last batch": (BASE, 63),
    "trades, average, clipping": (replace(BASE, objective=TRADES(**SHORT), ema=0.9, clip=1.0), 83),
    "fat for trades in L2": (replace(BASE, objective=FATForTRADES(eps=1.0, step_size=0.3, steps=3, norm="l2")), 83),
    "mart, perturbed weights": (replace(BASE, objective=MART(**SHORT), awp=0.01), 63),
    "cat": (replace(BASE, objective=CAT(**SHORT, patience=1)), 83),
    "dat, streamed": (replace(BASE, objective=DAT(**SHORT)), 83),
    "cutmix, smoothing, adamw": (
        replace(BASE, augment="crop-flip+cutmix:1.0", label_smoothing=0.1, optimizer="adamw", lr=0.001),
        63,
    ),
}


class Exact(nn.Module):
    """A small network in float64, with or without batch-norm."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.double())


def network(norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Exact(norm)


def digits(count: int, *, streamed: bool = False) -> Dataset:
    whole = load("digits")
    train = whole.train.head(count + BASE.validation)
    return replace(whole, train=rows_of(train) if streamed else train, test=whole.test.head(10))


def trained(config: Config, count: int, folder: str, norm: bool, engine: str, streamed: bool = False):
    """(weights, checksums after every epoch) of this process."""
    sums = []
    record = loop._record

    def recording(state, *rest):
        sums.append(checksum(state.model.state_dict()))
        return record(state, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_record", recording)
        patch.setattr(loop.models, "check_network", lambda *_, **__: None)  # it refuses float64
        with joined(torch.device("cpu")) as world:
            given = {"data": digits(count, streamed=streamed), "tensorboard": False, "engine": engine, "world": world}
            net = network(norm) if engine == "plain" else None
            model = loop.train(config, folder, model=net, **given)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}, sums


def all_cases(folder: str):
    """Every case, one after the other, in one start of the processes."""
    return {
        name: trained(config, count, f"{folder}/{index}", False, "plain", "streamed" in name)
        for index, (name, (config, count)) in enumerate(CASES.items())
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return all_cases(str(tmp_path_factory.mktemp("alone")))


def close(one, other, within=1e-10):
    assert one.keys() == other.keys()
    for name, values in one.items():
        torch.testing.assert_close(torch.from_numpy(other[name]), torch.from_numpy(values), rtol=0, atol=within)


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_are_one_run_up_to_rounding(tmp_path, alone, size):
    members = group.run(size, all_cases, str(tmp_path))
    for name, (weights, _) in alone.items():
        for member in members:
            close(weights, member[name][0])
            assert member[name][1] == members[0][name][1] and len(member[name][1]) == 2, name
