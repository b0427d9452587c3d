"""The low-rank model of this directory, for people without the library that wrote it.

maestro-lod copies this file into directories of transformers models. It runs only if
`trust_remote_code=True` allows it, and needs torch and transformers alone. config.json says which
layers have two factors; every other line of the model is the one of transformers. With
`import maestro_lod` the same directory loads without this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

_METHOD = "maestro_lod"
_CONVS = {
    nn.Conv1d: torch.conv1d,
    nn.Conv2d: torch.conv2d,
    nn.Conv3d: torch.conv3d,
}


class LowRankLayer(nn.Module):
    """A layer whose weight is the product of `u` (rank, out) and `v` (rank, in, ...)."""

    bias: nn.Parameter | None

    def __init__(self, dense: Any, rank: int) -> None:
        super().__init__()
        weight = dense.weight
        out, into = weight.shape[0], tuple(weight.shape[1:])
        if isinstance(dense, Conv1D):
            into, out = (weight.shape[0],), weight.shape[1]
        self.u = nn.Parameter(weight.new_empty(rank, out))
        self.v = nn.Parameter(weight.new_empty(rank, *into))
        bias = getattr(dense, "bias", None)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.dense_type = type(dense)
        for key, value in vars(dense).items():  # stride, padding_idx, in_features, …
            if not key.startswith("_") and key != "training":
                setattr(self, key, value)

    def forward(self, input: Tensor) -> Tensor:
        if self.dense_type is nn.Embedding:
            return F.embedding(input, self.u.mT) @ self.v
        if self.dense_type in _CONVS:
            options: Any = self
            conv = _CONVS[self.dense_type]
            hidden = conv(input, self.v, None, options.stride, options.padding, options.dilation)
            ones = [1] * (self.v.ndim - 2)
            return conv(hidden, self.u.mT.reshape(-1, len(self.v), *ones), self.bias)
        return F.linear(F.linear(input, self.v), self.u.mT, self.bias)

    @property
    def weight(self) -> Tensor:
        """The dense weight, for code that expects a dense layer."""
        weight = (self.u.mT @ self.v.flatten(1)).view(-1, *self.v.shape[1:])
        return weight.mT if self.dense_type is Conv1D else weight


class SharedHead(nn.Module):
    """An output head that uses the factors of a low-rank embedding."""

    bias: nn.Parameter | None

    def __init__(self, embedding: LowRankLayer, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, where torch does not look for children
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        embedding = self._embedding[0]
        return F.linear(F.linear(input, embedding.v), embedding.u.mT, self.bias)

    @property
    def weight(self) -> Tensor:
        """The dense weight, for code that expects a linear layer."""
        return self._embedding[0].weight


def supports(dense: nn.Module) -> bool:
    """Return whether this file has a low-rank form of a dense layer."""
    if type(dense) in _CONVS:
        options: Any = dense
        return bool(options.groups == 1 and options.padding_mode == "zeros")
    return type(dense) in (nn.Linear, nn.Embedding, Conv1D)


def _names_in(model: Any, names: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that the saved model's layers have in this one, which may lack a head."""
    prefix, modules = model.base_model_prefix, dict(model.named_modules())
    found = {}
    for name in names:
        for here in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            if here in modules:
                found[name] = here
                break
    return found


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, layer)


def _make_low_rank(model: Any, layers: Mapping[str, Mapping[str, Any]]) -> None:
    names = _names_in(model, layers)
    for name, here in names.items():
        if layers[name]["form"] == "low-rank":
            _replace(model, here, LowRankLayer(model.get_submodule(here), layers[name]["rank"]))
    for name, here in names.items():
        if layers[name]["form"] == "shared":
            embedding = model.get_submodule(names[layers[name]["factors_of"]])
            _replace(model, here, SharedHead(embedding, model.get_submodule(here).bias))
    own = model.state_dict().keys()
    ties = model.all_tied_weights_keys.items()
    model.all_tied_weights_keys = {to: of for to, of in ties if to in own and of in own}
    # empty tensors, which stop whoever does not know the factors
    empty = {f"^{re.escape(name)}\\.weight$" for name in layers}
    known = model._keys_to_ignore_on_load_unexpected or set()
    model._keys_to_ignore_on_load_unexpected = {*known, *empty}


def __getattr__(name: str) -> Any:
    """Return the low-rank form of an architecture of transformers, under the same name."""
    dense = getattr(transformers, name, None)
    if not (isinstance(dense, type) and issubclass(dense, transformers.PreTrainedModel)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).__init__(config, *args, **kwargs)
        if _METHOD not in AUTO_QUANTIZER_MAPPING:  # else the library itself does it
            _make_low_rank(self, config.quantization_config["layers"])

    made: Any = type(name, (dense,), {"__init__": __init__, "__module__": __name__})
    globals()[name] = made
    return made
