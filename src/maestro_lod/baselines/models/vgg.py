"""VGG-19 with batch norm and a single linear classifier, for 32×32 images."""

from __future__ import annotations

from torch import Tensor, nn

_STAGES = ((1, 1), (2, 2), (4,) * 4, (8,) * 4, (8,) * 4)  # multiples of the first width


class VGG19(nn.Module):
    """20,035,018 parameters and 398,136,320 MACs; four max-pools and an average pool.

    `width` is that of the first stage; the others have 2, 4, 8 and 8 times as many channels.
    `stride` is that of the first convolution.
    """

    def __init__(self, classes: int = 10, width: int = 64, stride: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        into = 3
        for i, multiples in enumerate(_STAGES):
            for multiple in multiples:
                out = width * multiple
                conv = nn.Conv2d(into, out, 3, 1 if layers else stride, padding=1, bias=False)
                layers += [conv, nn.BatchNorm2d(out), nn.ReLU()]
                into = out
            last = i == len(_STAGES) - 1
            layers.append(nn.AdaptiveAvgPool2d(1) if last else nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(into, classes)
        for weight in self.features.parameters():
            if weight.ndim == 4:
                nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x).flatten(1))
        return logits


def vgg19_small(classes: int = 10, width: int = 16) -> VGG19:
    """Build VGG-19 for a CPU, with width 16: 1,255,546 parameters and 6,305,024 MACs."""
    return VGG19(classes, width, stride=2)
