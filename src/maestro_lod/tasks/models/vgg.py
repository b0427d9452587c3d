"""VGG-19 with batch norm and a single linear classifier, for 32×32 images."""

from __future__ import annotations

from torch import Tensor, nn

_STAGES = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)


class VGG19(nn.Module):
    """20,035,018 parameters and 398,136,320 MACs; four max-pools and an average pool."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        into = 3
        for i, widths in enumerate(_STAGES):
            for width in widths:
                conv = nn.Conv2d(into, width, 3, padding=1, bias=False)
                layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
                into = width
            layers.append(nn.AvgPool2d(2) if i == len(_STAGES) - 1 else nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(into, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x).flatten(1))
        return logits
