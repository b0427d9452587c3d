"""Recipe settings of low-rank training: by λ, to a size, or for all sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost, cost_of
from maestro_lod.model.inputs import Example
from maestro_lod.model.surgery import decompose
from maestro_lod.sizes.measured_allocation import CostKind
from maestro_lod.train.budget import Budget
from maestro_lod.train.elastic import Elastic, consolidation_epochs
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import Builder, Settings, setting
from maestro_lod.train.sampling import STRATEGIES
from maestro_lod.train.size_settings import amount, build_narrower


def _require_rank(value: Any) -> Any:
    """Return a rank or a share of the full rank; raise ValueError for anything else."""
    share = isinstance(value, float) and 0.0 < value < 1.0
    if not share and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError("must be a rank, or a share of the full rank between 0 and 1")
    return value


def _require_ranks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _require_rank(rank) for name, rank in value.items()}
    if value == 0:
        raise ValueError("must be 1 or more: rank 0 has nothing to train")
    return value if value is None else _require_rank(value)


@dataclass(frozen=True)
class Decomposition:
    """Which layers become low-rank, as in `maestro_lod.decompose`."""

    only: list[str] | None = setting(None, "patterns of layers; others stay dense")
    skip: list[str] = setting([], "patterns of layers that stay dense")
    ranks: int | float | dict[str, int | float] | None = setting(
        None,
        "initial ranks: a rank, a share of the full rank, or one per layer",
        check=_require_ranks,
    )
    tied: Literal["keep", "share"] = setting("keep", "of an embedding with its head")


_RANKS_ALONE = {"params": 0.25, "macs": 0.5}
"""The share of dense below which a narrower model with more ranks has a lower loss.

The width is then reduced to the square root of the share, and the ranks give the rest.
"""


@contextmanager
def _with_hint(budget: Budget) -> Iterator[None]:
    """Add the budget's hint to an OptionError."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{error}{budget.hint}") from error


@dataclass(frozen=True)
class LoDSettings(Settings):
    """Recipe settings of low-rank training: by λ, to a size, or for all sizes."""

    alternatives = ("penalty", "budget", "elastic")

    decompose: Decomposition = Decomposition()
    budget: Budget | None = None
    elastic: float = setting(0.0, "the share of dense down to which every size is trained", least=0)
    elastic_cost: CostKind = setting("params", "of elastic: the cost of a size")
    penalty: float = setting(0.0, "λ of the group lasso, instead of a budget", least=0.0)
    narrow: bool = setting(True, "begin narrower for a small budget, if there is a width")
    threshold: float = setting(1e-7, "of penalty: importance of ranks to remove", least=0.0)
    sampling: str = setting("pairs", "of penalty: how a step's rank is drawn", choices=STRATEGIES)
    proximal: bool = setting(False, "of penalty: exact zeros under any optimizer")
    shrink: bool = setting(True, "of penalty: remove useless ranks after each epoch")
    min_rank: int = setting(0, "of penalty: rank that every layer keeps", least=0)
    full_pass: bool = setting(False, "of penalty: one more pass at full rank per step")
    distill: bool = setting(False, "of penalty: train the sampled pass on the full one's")

    def __post_init__(self) -> None:
        if self.distill and not self.full_pass:
            raise OptionError("distill needs the full pass as its teacher. Set full_pass=true.")
        if self.budget is not None and (self.penalty or not self.shrink):
            raise OptionError(
                "budget cannot be combined with penalty or shrink=false. Leave them out."
            )
        if self.elastic:
            if not 0.0 < self.elastic < 1.0:
                raise OptionError(
                    f"elastic={self.elastic!r} must be a share of the dense model between 0 and 1, "
                    "such as 0.1: the smallest size to train."
                )
            if self.budget is not None or self.penalty:
                raise OptionError(
                    "elastic cannot be combined with penalty or budget. Leave them out."
                )

    def build(self, builder: Builder, example: Example) -> nn.Module:
        budget = self.budget
        if budget is None or not self.narrow or builder.width is None:
            return super().build(builder, example)
        share = budget.value
        if share > 1:  # a count
            share /= amount(cost_of(builder(), example), budget.kind)
        if share >= _RANKS_ALONE[budget.kind]:
            return super().build(builder, example)
        with _with_hint(budget):
            return self.prepare(build_narrower(builder, example, math.sqrt(share), budget.kind))

    def prepare(self, model: nn.Module) -> nn.Module:
        chosen = vars(self.decompose) | {"skip": self.decompose.skip or None}
        return decompose(model, **chosen)

    def epochs_within(self, total: int) -> int:
        if self.budget is None and not self.elastic:
            return total
        return max(1, total - consolidation_epochs(total))

    @classmethod
    def at_size(cls, size: float) -> dict[str, Any]:
        return {"budget": {"params": size}}

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> LoD | Elastic:
        train: LoD | Elastic
        if self.budget is not None:
            # relative to the recipe's model, which may be wider
            budget = self.budget
            limit = budget.limit(amount(dense, budget.kind))
            with _with_hint(budget):
                train = Elastic(
                    model, optimizer, sizes=[limit], cost=budget.kind, seed=seed, example=example
                )
        elif self.elastic:
            train = Elastic(
                model, optimizer, smallest=self.elastic, cost=self.elastic_cost, seed=seed,
                example=example,
            )  # fmt: skip
        else:
            train = LoD(
                model, optimizer, penalty=self.penalty, seed=seed, sampling=self.sampling,
                threshold=self.threshold if self.shrink else None, proximal=self.proximal,
                min_rank=self.min_rank, full_pass=self.full_pass, distill=self.distill,
                example=example,
            )  # fmt: skip
        train.compare_with(dense)
        return train
