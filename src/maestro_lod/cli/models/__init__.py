"""Models that a recipe can name."""

from collections.abc import Callable

from torch import nn

from maestro_lod.cli.registry import Registry

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "lenet": "cli.models.lenet:LeNet",
        "resnet18": "baselines.models.resnet:resnet18",
        "resnet18_small": "baselines.models.resnet:resnet18_small",
        "resnet50": "baselines.models.resnet:resnet50",
        "vgg19": "baselines.models.vgg:VGG19",
        "vgg19_small": "baselines.models.vgg:vgg19_small",
        "transformer": "baselines.models.transformer:Transformer",
        "transformer_small": "baselines.models.transformer:transformer_small",
    },
)
