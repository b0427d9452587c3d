"""ResNet-18 for CIFAR and ResNet-50 for ImageNet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


def _shortcut(into: int, out: int, stride: int) -> nn.Module:
    if stride == 1 and into == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(into, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 1×1, a 3×3 that carries the stride, a 1×1 to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(into, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of blocks at 1, 2, 4 and 8 times its width, and a linear classifier."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        stem: nn.Module,
        classes: int,
        width: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        stages: list[nn.Module] = []
        into = width
        for i, depth in enumerate(depths):
            blocks = []
            for j in range(depth):
                blocks.append(block(into, width * 2**i, 2 if i > 0 and j == 0 else 1))
                into = width * 2**i * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(into, classes)
        for weight in self.parameters():
            if weight.ndim == 4:
                nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def resnet18(classes: int = 10, width: int = 64, stride: int = 1) -> ResNet:
    """Build ResNet-18 for 32×32 images: 11,173,962 parameters and 555,422,720 MACs.

    `width` is that of the first stage; the others have 2, 4 and 8 times as many channels. `stride`
    is that of the stem.
    """
    conv = nn.Conv2d(3, width, 3, stride, 1, bias=False)
    stem = nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())
    return ResNet(BasicBlock, (2, 2, 2, 2), stem, classes, width)


def resnet18_small(classes: int = 10, width: int = 16) -> ResNet:
    """Build ResNet-18 for a CPU, with width 16: 701,466 parameters and 8,762,624 MACs."""
    return resnet18(classes, width, stride=2)


def resnet50(classes: int = 1000, width: int = 64) -> ResNet:
    """Build ResNet-50 for 224×224 images: 25,557,032 parameters and 4,089,184,256 MACs."""
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    )
    return ResNet(Bottleneck, (3, 4, 6, 3), stem, classes, width)
