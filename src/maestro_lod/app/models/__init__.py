"""The models of the paper, and smaller ones of the same structure."""

from collections.abc import Callable

from torch import nn

from maestro_lod.app.models.lenet import LeNet
from maestro_lod.app.models.resnet import ResNet, resnet18, resnet18_small, resnet50
from maestro_lod.app.models.transformer import Transformer, transformer_small
from maestro_lod.app.models.vgg import VGG19, vgg19_small

MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "resnet18": resnet18,
    "resnet18_small": resnet18_small,
    "resnet50": resnet50,
    "vgg19": VGG19,
    "vgg19_small": vgg19_small,
    "transformer": Transformer,
    "transformer_small": transformer_small,
}
"""By the name that a recipe gives."""

__all__ = [
    "MODELS",
    "VGG19",
    "LeNet",
    "ResNet",
    "Transformer",
    "resnet18",
    "resnet18_small",
    "resnet50",
    "transformer_small",
    "vgg19_small",
]
