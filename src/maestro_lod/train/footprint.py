"""How many bytes a training step holds at once, counted from shapes: nothing is computed.

A copy of the model runs on the meta device with autograd on, and what autograd keeps for the
backward is added up: activations, and products of factors. Kernels' own buffers are not in it, and
of the loss only what cross-entropy would keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from maestro_lod.layers.ranks import low_rank_layers, unwrapped
from maestro_lod.model.inputs import Example, ModelInputs
from maestro_lod.model.replace import copy_on_meta, copy_without_hooks
from maestro_lod.model.structure import Form, restructure, structure_of, uninitialized

_OF_A_LOSS = 2  # times the outputs: what cross-entropy keeps of them, and their gradient


@dataclass(frozen=True)
class Footprint:
    """Bytes of a training step, by what they are for."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    saved: int
    """Activations and composed weights that the backward needs."""

    @property
    def total(self) -> int:
        """The most that there can be at once: all gradients while nothing saved is freed yet."""
        return self.weights + self.gradients + self.optimizer + self.saved

    def to_dict(self) -> dict[str, int]:
        return {**vars(self), "total": self.total}


def footprint(
    model: nn.Module,
    example: Example,
    *,
    batch: int = 1,
    moments: int = 1,
    form: Literal["now", "full rank", "dense"] = "now",
) -> Footprint:
    """Return what a training step of a model holds: as it is now, with all ranks, or dense.

    `example` is an input of one sample, of which a `batch` has so many, or a batch; `moments` is
    how many values an optimizer keeps for each parameter: 2 for Adam, 1 for SGD with momentum.
    """
    wanted = structure_of(model)
    for name, layer in low_rank_layers(model).items():
        wanted[name] = Form("low-rank", layer.full_rank)

    def changed(twin: nn.Module) -> nn.Module:
        if form != "now":
            twin = restructure(twin, {}, fill=uninitialized)
        return restructure(twin, wanted, fill=uninitialized) if form == "full rank" else twin

    return _of_copy(model, changed, ModelInputs.of_example(example), batch, moments)


def _of_copy(
    model: nn.Module,
    change: Callable[[nn.Module], nn.Module],
    call: ModelInputs,
    batch: int,
    moments: int,
) -> Footprint:
    """Count on a copy without values or, of a model that looks at some, on one that really runs."""
    batched = call.map_tensors(lambda sample: _repeated(sample, batch))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            inputs = batched.on_meta().map_tensors(mode.from_tensor)
            return _counted(change(copy_on_meta(model)), inputs, moments)
    except Exception:
        twin = change(copy_without_hooks(unwrapped(model), {}))
        with torch.random.fork_rng(devices=[]):
            return _counted(twin.cpu(), batched.map_tensors(Tensor.cpu), moments)


def _counted(twin: nn.Module, call: ModelInputs, moments: int) -> Footprint:
    params, buffers = list(twin.parameters()), list(twin.buffers())
    trained = sum(_bytes(p) for p in params if p.requires_grad)
    own = set(map(_storage, (*params, *buffers)))
    saved: dict[int, Tensor] = {}  # by storage: views of one are kept once

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            saved[_storage(tensor)] = tensor
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call.call(twin.train())
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return Footprint(
        weights=sum(map(_bytes, (*params, *buffers))),
        gradients=trained,
        optimizer=moments * trained,
        saved=sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
        + _OF_A_LOSS * sum(map(_bytes, outputs)),
    )


def _repeated(sample: Tensor, batch: int) -> Tensor:
    """Make a batch of one sample; what has no sample in its first dimension stays as it is."""
    if sample.ndim == 0 or sample.shape[0] != 1:
        return sample
    return sample.expand(batch, *sample.shape[1:]).contiguous()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # also without values, where nothing has an address


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
