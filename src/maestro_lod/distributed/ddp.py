"""A model inside DistributedDataParallel: its wrapper is found, and made anew when ranks go.

The wrapper's reducer holds buckets in the shapes that parameters had when it was made. After a
shrink it is therefore made again, with the same arguments, in the same object, so that whoever
holds the wrapper goes on with it and less is sent over the wire.
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


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers around low-rank layers of the model, or around what holds them.

    Wrappers that were deleted may be among them for a while. They do no harm: one that is not run
    sends nothing.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    kinds = _with_subclasses(DistributedDataParallel)
    mine = {id(m) for m in model.modules() if isinstance(m, LowRank)}
    return [
        obj
        for obj in gc.get_objects()
        if type(obj) in kinds  # isinstance would run the code of proxies, and take long
        and "module" in obj._modules
        and any(id(m) in mine for m in obj.modules())
    ]


def live_wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the same without those that were deleted, which takes longer."""
    if not wrappers_of(model):
        return []
    gc.collect()
    return wrappers_of(model)


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def require_renewable(ddp: DistributedDataParallel) -> None:
    """Refuse a wrapper with options that could not be given to it again."""
    if getattr(ddp, "mixed_precision", None) is not None:
        raise LayerError(
            "DistributedDataParallel(mixed_precision=…) keeps copies of the parameters that cannot "
            "follow a shrink. Use torch.autocast, or threshold=None not to shrink."
        )
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise LayerError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) holds parameters that a "
            "shrink replaces. Leave it out, or set threshold=None not to shrink."
        )


def joining(ddp: DistributedDataParallel) -> bool:
    """Say whether the wrapper is inside `join()`, where processes stop one by one."""
    return bool(ddp._join_config.enable)


def release(ddp: DistributedDataParallel) -> None:
    """Take the wrapper's hooks off the parameters; it cannot run until it is made anew."""
    vars(ddp).pop("logger", None)  # which holds the reducer too
    vars(ddp).pop("reducer", None)  # takes its hooks along
    for handle in vars(ddp).pop("_accum_grad_hooks", ()):
        handle.remove()


def renew(ddp: DistributedDataParallel) -> None:
    """Make the wrapper anew, in place, for the parameters that its module has now.

    Nothing is sent: parameters are the same in all processes before a shrink, and after it.
    """
    release(ddp)  # first: parameters that stay would keep the old hooks as long as anyone has them
    before, arguments = dict(vars(ddp)), _arguments(ddp)
    DistributedDataParallel.__init__(ddp, before["_modules"]["module"], **arguments)
    fresh = set(vars(ddp))
    of_module = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
    kept = {"require_backward_grad_sync", "require_forward_param_sync", *of_module}
    for key, value in before.items():
        if key not in fresh or key in kept:  # hooks on the wrapper, what others put on it
            vars(ddp)[key] = value
    for hook, state in before.get("_comm_hooks", ()):
        ddp.register_comm_hook(state, hook)


def inside(model: nn.Module) -> nn.Module:
    """Return the model in a wrapper, which runs without the other processes."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def quiet(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a wrapper sends nothing: more gradients are to be added."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def follow(model: nn.Module) -> None:
    """Make a wrapper anew if its module has other parameters than it was made for."""
    if not isinstance(model, DistributedDataParallel):
        return
    ignored = model.parameters_to_ignore
    now = [id(p) for name, p in model.module.named_parameters() if name not in ignored]
    if now != [id(p) for p in model._module_parameters]:
        renew(model)


def _arguments(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return the arguments with which the wrapper was made, as far as it says what they were."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    same = {
        name: getattr(ddp, name)
        for name in known
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
