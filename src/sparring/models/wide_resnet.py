"""Wide ResNets (WRN-depth-width), pre-activation, without dropout, with ReLU or another activation (SiLU).

Depth has two conventions for the same function, n blocks in each of three stages: n = (depth - 4) / 6 (Zagoruyko and
Komodakis; TRADES) and n = (depth - 2) / 6 (Madry; the paper's Table 1). So WRN-32-10 and WRN-34-10 are one network.

| at 3x32x32, 10 classes | n | parameters | GMAC    |
|------------------------|---|------------|---------|
| WRN-32-10, WRN-34-10   | 5 | 46,160,474 | 6.6589  |
| WRN-58-10              | 9 | 84,885,594 | 12.3212 |
| WRN-40-4               | 6 | 8,949,210  | 1.2986  |
| WRN-28-10              | 4 | 36,479,194 | 5.2433  |

The keys of the state_dict and the initialisation are those of the published code (TRADES, MART, FAT); the `sub_block1`
in some published checkpoints is never used by the forward pass and does not exist here. The last pooling is global: at
32x32 it equals the published 8x8 average pooling, and any size from 4x4 works.

Numbered layers, as in App. C, where WRN-40-4 has "totally 41 layers": every convolution counts, including the three 1x1
shortcuts, and the logits (1 + 36 + 3 + 1 = 41). 1 is the stem. A block has conv1, the shortcut if there is one, and
conv2. Outputs are taken where a layer of a pre-activation network ends: conv1 and the shortcut before the next
batch-norm; conv2 after the addition, as the output of its block. So App. C's layers 38, 40 and 41 are the outputs of
the last two blocks and the logits. (The paper does not define its numbering; this is the one that gives 41.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from sparring.errors import UserError

Activation = Callable[[Tensor], Tensor]


def blocks_per_stage(depth: int) -> int:
    """The number of blocks per stage of a WRN of this depth, by either convention (no depth fits both)."""
    for extra in (4, 2):  # layers outside the blocks in each convention
        n, rest = divmod(depth - extra, 6)
        if rest == 0 and n >= 1:
            return n
    shallower = [d for d in range(depth - 5, depth) if d >= 8 and d % 6 in (2, 4)]
    deeper = [d for d in range(max(depth + 1, 8), max(depth + 1, 8) + 5) if d % 6 in (2, 4)]
    nearest = " or ".join(str(d) for d in [*shallower[-1:], *deeper[:1]])
    raise UserError(f"the depth of a WRN must be 6n + 4 or 6n + 2 with n >= 1, got {depth}. The nearest: {nearest}.")


class Block(nn.Module):
    """conv2(relu(bn2(conv1(h)))) plus x itself, or plus convShortcut(h) where the width changes; h = relu(bn1(x)).

    `activation` takes the place of the ReLU.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Activation = F.relu) -> None:
        super().__init__()
        self.activation = activation
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.convShortcut: nn.Conv2d | None = None
        if inputs != outputs:
            self.convShortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One residual block."""
        h = self.activation(self.bn1(x))
        residual: Tensor = self.conv2(self.activation(self.bn2(self.conv1(h))))
        return residual + (x if self.convShortcut is None else self.convShortcut(h))


class Stage(nn.Module):
    """n blocks of one width; the first may halve the image. A module to match the published key `blockK.layer`."""

    def __init__(self, n: int, inputs: int, outputs: int, stride: int, activation: Activation = F.relu) -> None:
        super().__init__()
        first, rest = Block(inputs, outputs, stride, activation), range(n - 1)
        self.layer = nn.Sequential(first, *(Block(outputs, outputs, 1, activation) for _ in rest))

    def forward(self, x: Tensor) -> Tensor:
        """All blocks in sequence."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """A stem of 16 channels, then stages of 16, 32 and 64 times `width` channels; the last two halve the image."""

    def __init__(
        self,
        *,
        n: int,
        width: int,
        num_classes: int,
        channels: int,
        normalize: nn.Module,
        activation: Activation = F.relu,
    ) -> None:
        super().__init__()
        self.normalize, self.activation = normalize, activation
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.block1 = Stage(n, 16, 16 * width, 1, activation)
        self.block2 = Stage(n, 16 * width, 32 * width, 2, activation)
        self.block3 = Stage(n, 32 * width, 64 * width, 2, activation)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        nn.init.zeros_(self.fc.bias)  # batch-norm already starts at 1 and 0
        names = ["conv1"]
        for name, module in self.named_modules():
            if isinstance(module, Block):
                shortcut = [] if module.convShortcut is None else [f"{name}.convShortcut"]
                names += [f"{name}.conv1", *shortcut, name]
        self.layer_names = (*names, "fc")

    def forward(self, x: Tensor) -> Tensor:
        """Pixels in [0, 1] to logits."""
        h = self.conv1(self.normalize(x))
        h = self.block3(self.block2(self.block1(h)))
        h = self.activation(self.bn1(h))
        logits: Tensor = self.fc(h.mean((2, 3)))
        return logits
