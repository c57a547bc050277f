"""Check a stranger's robustness claim: their network, their state_dict, your evaluation.

The network below looks robust under plain PGD. It is not: it was trained in the standard way, and its last line makes
the softmax so steep that gradients vanish. Sparring reports the accuracy that PGD leaves, and its doubts about it.

    python examples/evaluate_a_checkpoint.py                 # makes a stand-in for the stranger's file
    python examples/evaluate_a_checkpoint.py theirs.pt       # or takes one
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparring
from sparring import data

EPS = 0.1
IMAGES = 150  # a few, so that this takes seconds


class TheirNet(nn.Module):
    """The stranger's network, as their repository has it. Any module from pixels in [0, 1] to logits will do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, scaled up: this is what hides the gradients from an attack that follows cross-entropy."""
        return 300 * self.body(x)


def stand_in(path: Path) -> Path:
    """Write a state_dict such as the stranger would publish: standard training for a few seconds."""
    torch.manual_seed(0)
    digits, model = data.load("digits").train, TheirNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(10):
        for rows in torch.randperm(len(digits)).split(64):
            loss = F.cross_entropy(model.body(digits.x[rows].float() / 255), digits.y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), path)
    return path


def main(path: Path) -> sparring.evaluation.Result:
    """Evaluate the network with the weights at `path`."""
    model = TheirNet()
    # weights_only: a file that somebody else wrote should hold numbers and no code.
    model.load_state_dict(torch.load(path, weights_only=True))
    model.eval()  # forgotten, it would be one of the doubts
    test = data.load("digits").test
    # mart: FGSM, PGD-20 and C&W. For a number to quote, add "autoattack" and take all images: that takes minutes.
    result = sparring.evaluate(model, test.x, test.y, "mart", eps=EPS, limit=IMAGES)
    for attack in result:
        print(f"{attack.name:8} {100 * attack.accuracy:5.1f} %   of {attack.n} images")
    for doubt in result.doubts:
        print(f"Doubt: {doubt['name']}. {doubt['why']} {doubt['evidence']}")
    if result.doubts:
        print("Each doubt has a page: sparring evaluate --explain NAME")
    return result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(stand_in(Path(folder) / "theirs.pt"))
