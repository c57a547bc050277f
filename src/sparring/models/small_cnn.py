"""Small CNN: the paper's 8-layer network, six 3x3 convolutions and two dense layers (Sec. 5.1, App. C).

1,639,282 parameters and 0.1335 GMAC at 3x32x32 and 10 classes. The keys of the state_dict are those of the authors'
code. Each of the three poolings halves the size, rounding down, so the smallest input is 8x8; the width of the first
dense layer depends on the input size.

Numbered layers: 1-6 the convolutions, taken after batch-norm and ReLU and before pooling; 7 the first dense layer,
after its ReLU; 8 the logits.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SmallCNN(nn.Module):
    """Convolutions 64-64, 128-128, 196-196 with a 2x2 max-pooling after each pair, then dense 256 and logits."""

    layer_names = (
        "block1_relu1",
        "block1_relu2",
        "block2_relu1",
        "block2_relu2",
        "block3_relu1",
        "block3_relu2",
        "relu_fc1",
        "fc2",
    )

    def __init__(self, *, num_classes: int, channels: int, size: tuple[int, int], normalize: nn.Module) -> None:
        super().__init__()
        height, width = size
        self.normalize = normalize
        self.block1_conv1 = nn.Conv2d(channels, 64, 3, padding=1)
        self.batchnorm1_1 = nn.BatchNorm2d(64)
        self.block1_relu1 = nn.ReLU()
        self.block1_conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.batchnorm1_2 = nn.BatchNorm2d(64)
        self.block1_relu2 = nn.ReLU()
        self.block2_conv1 = nn.Conv2d(64, 128, 3, padding=1)
        self.batchnorm2_1 = nn.BatchNorm2d(128)
        self.block2_relu1 = nn.ReLU()
        self.block2_conv2 = nn.Conv2d(128, 128, 3, padding=1)
        self.batchnorm2_2 = nn.BatchNorm2d(128)
        self.block2_relu2 = nn.ReLU()
        self.block3_conv1 = nn.Conv2d(128, 196, 3, padding=1)
        self.batchnorm3_1 = nn.BatchNorm2d(196)
        self.block3_relu1 = nn.ReLU()
        self.block3_conv2 = nn.Conv2d(196, 196, 3, padding=1)
        self.batchnorm3_2 = nn.BatchNorm2d(196)
        self.block3_relu2 = nn.ReLU()
        self.fc1 = nn.Linear(196 * (height // 8) * (width // 8), 256)
        self.relu_fc1 = nn.ReLU()
        self.fc2 = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels in [0, 1] to logits."""
        h = self.normalize(x)
        h = self.block1_relu1(self.batchnorm1_1(self.block1_conv1(h)))
        h = self.block1_relu2(self.batchnorm1_2(self.block1_conv2(h)))
        h = F.max_pool2d(h, 2)
        h = self.block2_relu1(self.batchnorm2_1(self.block2_conv1(h)))
        h = self.block2_relu2(self.batchnorm2_2(self.block2_conv2(h)))
        h = F.max_pool2d(h, 2)
        h = self.block3_relu1(self.batchnorm3_1(self.block3_conv1(h)))
        h = self.block3_relu2(self.batchnorm3_2(self.block3_conv2(h)))
        h = F.max_pool2d(h, 2)
        h = self.relu_fc1(self.fc1(h.flatten(1)))
        logits: Tensor = self.fc2(h)
        return logits
