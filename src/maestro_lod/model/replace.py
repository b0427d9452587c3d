"""Transfer of hooks, biases and user attributes to replaced layers; copies of models."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from maestro_lod.distributed.fsdp import reshard, without_fsdp
from maestro_lod.distributed.shards import gathered, is_sharded
from maestro_lod.errors import LayerError
from maestro_lod.layers.pivoted import PivotedInputs
from maestro_lod.layers.registry import is_unpacked

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)  # fmt: skip
STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


def transfer_attributes(
    old: nn.Module, new: nn.Module, *, added_by: nn.Module | None = None
) -> None:
    """Transfer hooks, the bias Parameter (it may be shared) and user attributes to another layer.

    A replacement of a torch layer lists the names of user attributes. `added_by` has the list if it
    is neither of the two.
    """
    for attribute in _HOOKS + _HOOK_FLAGS:
        setattr(new, attribute, getattr(old, attribute))
    if "bias" in old._parameters and "bias" in last_plain_layer(new)._parameters:
        last_plain_layer(new).bias = old.bias
    keeper = added_by or old
    if hasattr(type(new), "user_attributes"):
        unpacked = is_unpacked(new)  # torch's layer then has private attributes too
        new.__dict__["user_attributes"] = tuple(
            key
            for key in (*vars(old), *old._buffers)
            if not hasattr(new, key) and not (unpacked and key.startswith("_"))
        )
        keeper = new
    for key in getattr(keeper, "user_attributes", ()):
        _put(new, key, getattr(old, key), old)


def last_plain_layer(layer: nn.Module) -> nn.Module:
    """Return the plain layer that holds the bias: the last one of several."""
    if isinstance(layer, PivotedInputs):
        return layer.second
    return layer[-1] if isinstance(layer, nn.Sequential) else layer


def own_memory(layer: nn.Module, keys: Iterable[str]) -> None:
    """Copy these parameters of a layer to separate memory, in place."""
    for key in keys:
        if (parameter := layer._parameters.get(key)) is not None:
            copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            layer._parameters[key] = copied


def _put(new: nn.Module, key: str, value: Any, old: nn.Module) -> None:
    """Set an attribute of a module, as a buffer if it was one."""
    if key in old._buffers:
        new.register_buffer(key, value, persistent=key not in old._non_persistent_buffers_set)
    else:
        setattr(new, key, value)


_locks: WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def model_lock(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the lock of a model, for exchanging or copying its modules."""
    with _locks_lock:
        return _locks.setdefault(model, threading.RLock())


def copy_without_hooks(
    model: nn.Module, memo: dict[int, Any], replaced: Iterable[nn.Module] = ()
) -> nn.Module:
    """Deep-copy a model without hooks; objects in `memo` (by id) are used instead of copies.

    The objects in `memo` for layers in `replaced` get copies of the layers' user attributes.
    """
    with model_lock(model):
        return _copy_without_hooks(model, memo, replaced)


def _copy_without_hooks(
    model: nn.Module, memo: dict[int, Any], replaced: Iterable[nn.Module] = ()
) -> nn.Module:
    for module in model.modules():
        for attribute in _HOOKS + STATE_HOOKS:
            hooks: dict[int, Any] = getattr(module, attribute)
            memo[id(hooks)] = OrderedDict((k, h) for k, h in hooks.items() if _makes_weights(h))
        for value in _loose_tensors(module):  # activations, weights computed by such hooks
            if not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    try:
        copied = copy.deepcopy(model, memo)
        for layer in replaced:
            for key in getattr(layer, "user_attributes", ()):
                _put(memo[id(layer)], key, copy.deepcopy(getattr(layer, key), memo), layer)
    except TypeError as error:
        raise LayerError(
            f"{type(model).__name__} cannot be deep-copied ({error}). Remove the attribute that "
            "cannot be copied, or define __deepcopy__."
        ) from error
    for (
        module
    ) in copied.modules():  # transformers records that it installed hooks, which the copy lacks
        vars(module).pop("_output_capturing_hooks_installed", None)
    return copied


def copy_whole(model: nn.Module) -> nn.Module:
    """Copy a model that FSDP2 shards, with whole parameters and without FSDP.

    All processes have to call it, and each gets a copy.
    """
    reshard(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if is_sharded(parameter):
            whole = gathered(parameter.detach()).clone()
            memo[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
    for module in model.modules():
        if (holders := vars(module).get("_holders")) is not None:
            memo[id(holders)] = None  # FSDP's objects for its factors
    with model_lock(model), without_fsdp(model) as states:
        memo |= {id(state): OrderedDict() for state in states}
        return _copy_without_hooks(model, memo)


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device: its structure and shapes without values."""
    memo: dict[int, Any] = {}
    loose = (tensor for module in model.modules() for tensor in _loose_tensors(module))
    for tensor in (*model.parameters(), *model.buffers(), *loose):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy_without_hooks(model, memo)


def _makes_weights(hook: Any) -> bool:
    """Return whether a hook is one with which torch computes weights, not a user's."""
    hook = getattr(hook, "hook", hook)  # torch wraps hooks that run before loading
    lazy = getattr(hook, "__name__", "") in ("_infer_parameters", "_lazy_load_hook")
    return lazy or type(hook).__module__.startswith("torch.nn.utils")


def _loose_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in a module's attributes and in containers there."""
    for value in vars(module).values():
        yield from (held for held in find_references(value) if isinstance(held, Tensor))


def find_references(value: Any) -> Iterator[nn.Module | Tensor]:
    """Yield the modules and tensors in a value, in plain containers, or bound to a function."""
    waiting, seen = [value], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, nn.Module | Tensor):
            yield part
        elif id(part) not in seen:  # containers may hold themselves
            seen.add(id(part))
            if isinstance(part, dict):
                waiting += part.values()
            elif isinstance(part, list | tuple | set):
                waiting += part
            elif isinstance(part, functools.partial):
                waiting += [part.func, part.args, part.keywords]
            elif isinstance(part, types.MethodType):
                waiting.append(part.__self__)
            elif isinstance(part, types.SimpleNamespace):
                waiting += vars(part).values()
