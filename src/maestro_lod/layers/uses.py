"""Uses of factors: by their low-rank layer, or by a head that shares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from maestro_lod.layers.embedding import SharedHead
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.layers.registry import is_unpacked

FactorUser: TypeAlias = LowRank | SharedHead
Role: TypeAlias = Literal["low-rank", "shared", "unpacked"]


def module_role(module: nn.Module | None) -> Role | None:
    """Return the role of a module in a low-rank model, None for a layer of the dense one."""
    if isinstance(module, LowRank):
        return "low-rank"
    if isinstance(module, SharedHead):
        return "shared"
    return "unpacked" if module is not None and is_unpacked(module) else None


@dataclass(frozen=True)
class FactorUse:
    """One module that multiplies by the factors of a low-rank layer."""

    name: str
    """The name of the module that knows the cost."""
    owner: str
    """The low-rank layer that has the factors."""
    costs: FactorUser
    caller: str
    """The module whose inputs determine the number of positions."""
    count_positions: Callable[..., int]

    @property
    def kind(self) -> str:
        """The name of the kind of layer, for tables."""
        return self.costs.kind

    @property
    def head(self) -> SharedHead | None:
        """The head that shares its embedding's factors, None for the layer itself."""
        return self.costs if isinstance(self.costs, SharedHead) else None


def factor_uses(model: nn.Module) -> list[FactorUse]:
    """Return all uses of factors in the order of the model's modules."""
    modules = dict(model.named_modules())
    name_of = {id(layer): name for name, layer in low_rank_layers(model).items()}
    uses = []
    for name, module in modules.items():
        if isinstance(module, SharedHead):
            if id(module.embedding) in name_of:  # it may be outside of this part of the model
                owner = name_of[id(module.embedding)]
                uses.append(FactorUse(name, owner, module, name, module.count_positions))
        elif isinstance(module, LowRank):
            above = name.rpartition(".")[0]
            parent: Any = modules[above] if name else None
            inside = parent is not None and is_unpacked(parent) and parent.applies_parts
            caller, asked = (above, parent) if inside else (name, module)
            uses.append(FactorUse(name, name, module, caller, asked.count_positions))
    return uses
