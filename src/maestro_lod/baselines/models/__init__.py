"""The models of the paper, and smaller ones of the same structure."""

from maestro_lod.baselines.models.resnet import ResNet, resnet18, resnet18_small, resnet50
from maestro_lod.baselines.models.transformer import Transformer, transformer_small
from maestro_lod.baselines.models.vgg import VGG19, vgg19_small

__all__ = [
    "VGG19",
    "ResNet",
    "Transformer",
    "resnet18",
    "resnet18_small",
    "resnet50",
    "transformer_small",
    "vgg19_small",
]
