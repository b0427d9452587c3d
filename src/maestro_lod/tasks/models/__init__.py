"""The models of the paper."""

from maestro_lod.tasks.models.lenet import LeNet
from maestro_lod.tasks.models.resnet import ResNet, resnet18, resnet50
from maestro_lod.tasks.models.vgg import VGG19

__all__ = ["VGG19", "LeNet", "ResNet", "resnet18", "resnet50"]
