"""Blockers: the reasons why a layer cannot be decomposed."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from maestro_lod.layers.embedding import SharedHead, can_share
from maestro_lod.layers.registry import (
    low_rank_type,
    overridden_members,
    registered_base,
    unpacked_type,
    weights_read_by,
)
from maestro_lod.model.forward_analysis import Path, analyze_forward
from maestro_lod.model.replace import STATE_HOOKS, find_references
from maestro_lod.model.structure import uninitialized


class Blockers:
    """The reasons why modules of one model cannot be decomposed."""

    def __init__(self, model: nn.Module) -> None:
        # memory -> owners: (name of the module, name of the parameter, the module)
        self._owners: dict[int, list[tuple[str, str, nn.Module]]] = defaultdict(list)
        self._holders: dict[int, str] = {}  # module -> the other attribute that refers to it
        self._keepers: dict[int, str] = {}  # memory of a parameter -> that attribute
        self._readers: dict[int, str] = {}  # module -> the class whose code reads its weight
        self._wrappers: dict[int, str] = {}  # module -> the class of the adapter around it
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not is_lazy(parameter) and parameter.numel():
                    self._owners[_memory(parameter)].append((name, key, module))
            for key, value in vars(module).items():
                if key in ("_modules", "_parameters", "_flat_weights"):  # the last is torch's own
                    continue
                where = f"{name}.{key}".lstrip(".")
                for held in find_references(value):
                    if isinstance(held, nn.Module):
                        self._holders[id(held)] = where
                    elif isinstance(held, nn.Parameter) and not is_lazy(held):
                        self._keepers[_memory(held)] = where
            base = dict(module.named_children()).get(
                "base_layer"
            )  # the name in PEFT for the adapted layer
            if low_rank_type(type(base)) is not None:
                inner = (m for child in module.children() for m in child.modules())
                self._wrappers |= {id(m): type(module).__name__ for m in inner}
        methods = _called_methods(model)
        for module in model.modules():
            self._note_readers(module, methods.get(type(module), frozenset()))

    def _note_readers(self, module: nn.Module, methods: frozenset[str]) -> None:
        """Note which layers' weights the code of a module reads, or lets another module read."""
        kind: Any = type(module)
        reading = analyze_forward(kind, methods)
        for path in reading.weights:
            self._note_reader(kind, _descendants(module, path))
        for callee, argument, path in reading.passed:
            for called in _descendants(module, callee):
                reader: Any = type(called)
                if argument in analyze_forward(reader).arguments:
                    self._note_reader(reader, _descendants(module, path))
        for part in weights_read_by(kind):  # in torch's own code
            self._note_reader(kind, _descendants(module, tuple(part.split("."))))

    def _note_reader(self, kind: type, layers: list[nn.Module]) -> None:
        self._readers |= dict.fromkeys(map(id, layers), kind.__name__)

    def reason(self, module: nn.Module) -> str | None:
        """Return why a module cannot be decomposed, '' if it can, None if it has no matrix."""
        if low_rank_type(type(module)) is not None:
            return self._layer_reason(module)
        parameters = [p for p in module._parameters.values() if p is not None]
        if ".quantized." in type(module).__module__ and not isinstance(module, nn.Sequential):
            return "quantized"
        if parametrize.is_parametrized(module):
            return "parametrized"
        if any(is_lazy(p) for p in parameters):
            return _LAZY
        if all(p.ndim < 2 for p in parameters):
            return None
        if (base := registered_base(type(module))) is not None:
            changed = overridden_members(type(module), base)
            differs = "forward may differ" if "forward" in changed else f"{changed[0]} may matter"
            return f"a subclass of {base.__name__}, whose {differs}"
        return f"{type(module).__name__} is not a supported kind"

    def _layer_reason(self, module: nn.Module) -> str:
        if reason := self._weight_reason(module):
            return reason
        tied = self._tie_reason(module._parameters["weight"])  # type: ignore[arg-type]
        return tied or self._replacement_reason(module) or self.saving_reason(module)

    def sharing_reason(self, embedding: nn.Module, head: nn.Module) -> str:
        """Return why a tied embedding and head cannot be one factor pair, '' if they can."""
        for module in (embedding, head):
            if reason := self._weight_reason(module) or self._replacement_reason(module):
                return reason
        return self.saving_reason(embedding)

    def _weight_reason(self, module: nn.Module) -> str:
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed by a hook (weight norm, spectral norm, pruning)"
        if extra := module._parameters.keys() - {"weight", "bias"}:
            return f"it has further parameters ({', '.join(sorted(extra))})"
        kind = low_rank_type(type(module))
        assert kind is not None
        return kind.blocker(module) or self._parameter_reason(weight)

    def unpacking_reason(self, module: nn.Module) -> str:
        """Return why a layer with several weights cannot be unpacked, '' if it can."""
        if parametrize.is_parametrized(module):
            return "its weights are computed: it is parametrized"
        if reason := unpacked_type(type(module)).blocker(module):
            return str(reason)
        for parameter in module.parameters():
            if reason := self._parameter_reason(parameter) or self._tie_reason(parameter):
                return reason
        return self._replacement_reason(module)

    def _parameter_reason(self, weight: nn.Parameter) -> str:
        if is_lazy(weight):
            return _LAZY
        if type(weight) is not nn.Parameter or weight.dtype not in _DTYPES:
            return f"its weight is a {type(weight).__name__} of {weight.dtype}"
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return "its weight has tensor hooks, which its factors cannot call"
        return ""

    def _tie_reason(self, weight: nn.Parameter) -> str:
        owners = self._owners[_memory(weight)] if weight.numel() else []
        if len(owners) > 1:
            names = (f"{name}.{key}".lstrip(".") for name, key, _ in owners)
            return f"its weight is tied ({' = '.join(names)})"
        return ""

    def _replacement_reason(self, module: nn.Module) -> str:
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        if id(module) in self._holders:
            return (
                f"it is also held by {self._holders[id(module)]}, where torch would not replace it"
            )
        for key, parameter in module.named_parameters():
            where = self._keepers.get(_memory(parameter)) if parameter.numel() else None
            if where is not None and key != "bias":  # which stays the same Parameter
                return f"its {key} is also in {where}, which would keep it; fill {where} afterwards"
        is_unpackable = unpacked_type(type(module)) is not None
        if foreign := set() if is_unpackable else set(module._modules):
            return f"it has a submodule ({', '.join(sorted(foreign))})"
        names = vars(module).keys() | module._buffers.keys()
        if hidden := names & _added_names(type(module)):
            return f"a low-rank layer would hide its attribute {', '.join(sorted(hidden))}"
        if any(getattr(module, hooks) for hooks in STATE_HOOKS):
            return "it has hooks of its state dict, which expect a dense weight"
        if id(module) in self._wrappers:
            return f"it is wrapped by {self._wrappers[id(module)]}, which may change its weight"
        if id(module) in self._readers:
            return f"the code of {self._readers[id(module)]} reads its weight"
        return ""

    def saving_reason(self, module: nn.Module) -> str:
        """Return why decomposing saves nothing, '' if some rank saves weights."""
        probe = uninitialized("", module, 0)
        if probe.weights(1) >= probe.dense_weights:
            m, n = probe.matrix_shape
            per_group = " per group" if probe.groups > 1 else ""
            return f"no rank saves anything ({m}×{n}{per_group})"
        return ""

    def tied_heads(self) -> list[tuple[tuple[str, nn.Module], tuple[str, nn.Module]]]:
        """Return each embedding that is tied to exactly one linear head with it, by name."""
        return [
            ((name, table), (head_name, head))
            for owners in self._owners.values()
            if len(owners) == 2
            for (name, _, table), (head_name, _, head) in itertools.permutations(owners)
            if can_share(table, head)
        ]


def _added_names(dense: type[nn.Module]) -> set[str]:
    """Return the public names that a replacement of the layer has and the layer has not."""
    kinds: list[type[nn.Module] | None] = [low_rank_type(dense), unpacked_type(dense)]
    if dense is SharedHead.replaces:
        kinds.append(SharedHead)
    names = {name for kind in kinds if kind is not None for name in _names(kind)}
    taken = {"bias", *getattr(kinds[0], "options", ())}  # from the layer, which has them
    return {name for name in names - _names(dense) - taken if not name.startswith("_")}


def _names(kind: type[nn.Module]) -> set[str]:
    """Return the attribute names that a class declares, without those of every module."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    return names | set(getattr(kind, "__constants__", ()))


def _called_methods(model: nn.Module) -> dict[type, frozenset[str]]:
    """Return the methods of each class that the code of its containing modules calls."""
    methods: dict[type, frozenset[str]] = {}
    waiting, modules = True, list(model.modules())
    while waiting:  # called methods may call others
        waiting = False
        for module in modules:
            kind: Any = type(module)
            for path, name in analyze_forward(kind, methods.get(kind, frozenset())).calls:
                for called in map(type, _descendants(module, path)):
                    if name not in methods.get(called, frozenset()):
                        methods[called] = methods.get(called, frozenset()) | {name}
                        waiting = True
    return methods


def _descendants(module: nn.Module, path: Path) -> list[nn.Module]:
    """Return the modules inside a module that a path may lead to."""
    reached = [module]
    for key in path:
        reached = [child for each in reached for child in _children(each, key)]
    return reached


def _children(module: nn.Module, key: str) -> list[nn.Module]:
    """Return the child of this name if there is one; all children for "*"."""
    modules = module._modules  # of a scripted module it is another type, without get()
    names = [*modules.keys()] if key == "*" else [key] if key in modules else []
    return [child for name in names if (child := modules[name]) is not None]


_LAZY = "lazy: its shape is not known before the first forward"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of weights that can be factored and trained."""


def _memory(parameter: torch.Tensor) -> int:
    """Return a key that two parameters have in common iff they are tied."""
    return id(parameter) if parameter.is_meta else parameter.data_ptr()
