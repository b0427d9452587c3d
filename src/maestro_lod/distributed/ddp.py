"""DistributedDataParallel: find the wrapper of a model, and rebuild it after a shrink.

The wrapper's reducer has buckets in the shapes that parameters had at its construction. After a
shrink the wrapper is therefore initialized again in place, with the same arguments: references to
it stay valid, and fewer values are sent.
"""

from __future__ import annotations

import gc
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from maestro_lod.errors import LayerError
from maestro_lod.layers.lowrank import LowRank

_MIB = 2**20


def find_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers that contain low-rank layers of the model.

    Deleted wrappers may be among them until they are collected, without effect: a wrapper that is
    not run sends nothing.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    kinds = _with_subclasses(DistributedDataParallel)
    layers = {id(m) for m in model.modules() if isinstance(m, LowRank)}
    return [
        obj
        for obj in gc.get_objects()
        if type(obj) in kinds  # isinstance would run the code of proxies, and take long
        and "module" in obj._modules
        and any(id(m) in layers for m in obj.modules())
    ]


def find_live_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers of the model after a garbage collection, which takes longer."""
    if not find_wrappers(model):
        return []
    gc.collect()
    return find_wrappers(model)


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def require_renewable(ddp: DistributedDataParallel) -> None:
    """Raise LayerError for a wrapper whose options cannot be passed to it again."""
    if getattr(ddp, "mixed_precision", None) is not None:
        raise LayerError(
            "DistributedDataParallel(mixed_precision=…) keeps copies of the parameters, which "
            "cannot be shrunk. Use torch.autocast, or threshold=None not to shrink."
        )
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise LayerError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) references parameters that a "
            "shrink replaces. Leave it out, or set threshold=None not to shrink."
        )


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Return True inside `join()`, where processes stop one by one."""
    return bool(ddp._join_config.enable)


def release(ddp: DistributedDataParallel) -> None:
    """Remove the wrapper's hooks from the parameters; it cannot run before `renew`."""
    vars(ddp).pop("logger", None)  # which holds the reducer too
    vars(ddp).pop("reducer", None)  # takes its hooks along
    for handle in vars(ddp).pop("_accum_grad_hooks", ()):
        handle.remove()


def renew(ddp: DistributedDataParallel) -> None:
    """Initialize the wrapper again, in place, for the current parameters of its module.

    Nothing is sent: the parameters are equal in all processes before and after a shrink.
    """
    release(ddp)  # first: parameters that stay would keep the old hooks
    before, arguments = dict(vars(ddp)), _arguments(ddp)
    DistributedDataParallel.__init__(ddp, before["_modules"]["module"], **arguments)
    fresh = set(vars(ddp))
    module_attributes = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
    kept = {"require_backward_grad_sync", "require_forward_param_sync", *module_attributes}
    for key, value in before.items():
        if key not in fresh or key in kept:  # hooks and attributes that users put on it
            vars(ddp)[key] = value
    for hook, state in before.get("_comm_hooks", ()):
        ddp.register_comm_hook(state, hook)


def inside(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper, which runs without the other processes."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def quiet(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a wrapper sends no gradients, to accumulate more."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def follow(model: nn.Module) -> None:
    """Renew a wrapper if the parameters of its module were replaced."""
    if not isinstance(model, DistributedDataParallel):
        return
    ignored = model.parameters_to_ignore
    now = [id(p) for name, p in model.module.named_parameters() if name not in ignored]
    if now != [id(p) for p in model._module_parameters]:
        renew(model)


def _arguments(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return the arguments of the wrapper's construction, as far as it stores them."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    same = {
        name: getattr(ddp, name)
        for name in parameters
        if name not in ("self", "module", "mixed_precision", "device_mesh") and hasattr(ddp, name)
    }
    if "forward_sync_buffers" in same:
        same.pop("broadcast_buffers", None)  # its old name
    caps = [size / _MIB for size in getattr(ddp, "bucket_bytes_cap_list", ())]
    if caps:
        same["bucket_cap_mb_list"] = caps
    elif not getattr(ddp, "bucket_bytes_cap_default", False):
        same["bucket_cap_mb"] = ddp.bucket_bytes_cap / _MIB
    return same | {"init_sync": False}
