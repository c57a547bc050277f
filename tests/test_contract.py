"""The public contract runs: tests/contract.py on small data."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import sparring
from tests import contract


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def images(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (n, 1, 8, 8), generator=generator).float() / 255
    return x, torch.arange(n) % 10


def loader(n: int = 60) -> contract.Loader:
    return torch.utils.data.DataLoader(contract.PAIRS(*images(n)), batch_size=20)


def test_attacks():
    x, y = images()
    x_adv, friendly, backprops = contract.attacks(net(), x, y)
    assert (x_adv - x).abs().max() <= 8 / 255 + 1e-6
    assert (friendly - x).abs().max() <= 8 / 255 + 1e-6
    assert backprops.shape == y.shape and backprops.max() <= 10


def test_own_loop():
    model = net()
    before = model[1].weight.detach().clone()  # type: ignore[index, union-attr]
    contract.own_loop(model, loader(), torch.optim.SGD(model.parameters(), lr=0.1), epochs=2)
    assert not torch.equal(before, model[1].weight)  # type: ignore[index]


def test_package_loop_loading_and_evaluation(tmp_path):
    trained = contract.package_loop(net(), loader(100), loader(40), tmp_path)
    x, y = images(20)
    again, own = contract.loading(tmp_path, net())
    for model, loaded in zip(trained[:2], (again, own), strict=True):
        torch.testing.assert_close(model(x), loaded(x))
    accuracy, worst, doubts = contract.evaluation(again, x, y, tmp_path / "mine.json")
    assert 0 <= worst <= accuracy <= 1 and doubts >= 0
    assert (tmp_path / "mine.json").is_file()
    assert contract.evaluation_of_data(again, loader(20)) >= 0
    by_name = sparring.evaluate(again, "digits", protocol="quick", eps=0.3, limit=10, doubts=False)
    assert by_name.about["data"] == "digits"


def test_registering():
    contract.registering()
    with pytest.raises(sparring.UserError, match="resnet18"):
        sparring.register_model("resnet18", lambda: nn.Identity())


def test_names():
    assert {kind.__name__ for kind in contract.OBJECTIVES} <= set(sparring.__all__)
    assert all(hasattr(sparring, name) for name in sparring.__all__)
    assert "train" in sparring.__doc__


def test_importing_sparring_imports_no_torch():
    code = "import sys, sparring; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
