"""Sample the active ranks of training steps, as the paper does."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import (
    OptionError,
    TrainingError,
    listed,
    require_seed,
    suggest,
)
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.train.steps import live_ranks

STRATEGIES = {
    "pairs": "every (layer, rank) pair once in random order, then again, as in the paper",
    "several": "one or more such pairs, up to the number of layers, cut together",
}


class RankSampler:
    """Samples the active ranks of training steps from the current ranks of the layers.

    >>> sampler = RankSampler(model, seed=0)
    >>> with at_ranks(model, sampler.sample()):
    ...     F.cross_entropy(model(x), y).backward()

    Layers of rank 0 and frozen layers are left out. After a shrink, pairs that no longer exist are
    skipped. The sampler has its own random generator; `state_dict` and `load_state_dict` restore it
    exactly.

    Args:
        model: A model with low-rank layers.
        strategy: "pairs" samples every (layer, rank) pair once in random order, then again, as in
            the paper; "several" samples one or more pairs, up to the number of layers, so that
            layers are cut together.
        seed: Seed of the generator.

    Raises:
        LayerError: The model has no low-rank layers.
        OptionError: The strategy is not known, or the seed is invalid.
    """

    def __init__(self, model: nn.Module, *, strategy: str = "pairs", seed: int = 0) -> None:
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise OptionError(
                f"sampling strategy {strategy!r} is not known.{suggest(str(strategy), STRATEGIES)} "
                f"Choose from {listed(STRATEGIES)}."
            )
        self._model, self._layers = model, require_low_rank(model)
        self.strategy = strategy
        self.generator = torch.Generator("cpu").manual_seed(require_seed(seed))
        self.left_out: set[str] = set()
        """Layers that are not sampled, because the model's forward never reaches them."""
        self._names: list[str] = []
        self._pending: list[list[int]] = []  # [layer index, rank] not yet sampled; the last is next

    def live_ranks(self) -> dict[str, int]:
        """Return the layers that can be sampled, with their current ranks."""
        return live_ranks(self._layers, self.left_out)

    def _is_live(self, name: str, rank: int) -> bool:
        layer = self._layers.get(name)
        alone = {} if layer is None else live_ranks({name: layer}, self.left_out)
        return rank <= alone.get(name, 0)

    def chances(self) -> dict[str, list[float]]:
        """Return the probability of each layer to be at rank 1, 2, … in a sampled step."""
        ranks = self.live_ranks()
        pairs, layers = sum(ranks.values()), len(ranks)

        def at_least(rank: int) -> float:
            """Return the probability that no smaller rank of a layer was sampled."""
            missed = 1 - (rank - 1) / pairs
            if self.strategy == "several" and missed < 1:  # the mean of missed^1 … missed^layers
                return missed * (1 - missed**layers) / ((1 - missed) * layers)
            return missed

        return {
            name: [at_least(b) - (at_least(b + 1) if b < rank else 0.0) for b in range(1, rank + 1)]
            for name, rank in ranks.items()
        }

    def sample(self) -> dict[str, int]:
        """Sample the active ranks of the next step; layers that are left out keep all ranks."""
        if self.strategy == "pairs":
            return self._next_pair()
        ranks = self._require_ranks()
        drawn: dict[str, int] = {}
        for _ in range(self._draw(len(ranks)) + 1):
            name, rank = self._draw_pair(ranks)
            drawn[name] = min(rank, drawn.get(name, rank))
        return drawn

    def _draw_pair(self, ranks: dict[str, int]) -> tuple[str, int]:
        pick = self._draw(sum(ranks.values()))
        name = ""
        for name, rank in ranks.items():  # noqa: B007
            if pick < rank:
                break
            pick -= rank
        return name, pick + 1

    def _require_ranks(self) -> dict[str, int]:
        ranks = self.live_ranks()
        if not ranks:
            raise TrainingError(
                "no rank is left to sample: every low-rank layer has rank 0 or is frozen. "
                "Lower the penalty or set min_rank=1."
            )
        return ranks

    def _draw(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.generator, device="cpu"))

    def _next_pair(self) -> dict[str, int]:
        while True:
            while self._pending:
                index, rank = self._pending.pop()
                if self._is_live(self._names[index], rank):
                    return {self._names[index]: rank}
            ranks = self._require_ranks()
            self._names = list(ranks)
            pairs = [[i, b] for i, rank in enumerate(ranks.values()) for b in range(1, rank + 1)]
            order = torch.randperm(len(pairs), generator=self.generator, device="cpu")
            self._pending = [pairs[i] for i in order.tolist()]

    def fingerprint(self) -> str:
        """Return a short text that is equal for samplers with the same future samples."""
        state = bytes(self.generator.get_state().tolist())
        rest = repr((self.strategy, self._names, self._pending, sorted(self.left_out)))
        return f"{zlib.crc32(rest.encode(), zlib.crc32(state)):08x}"

    def state_dict(self) -> dict[str, Any]:
        """Return all state as tensors, strings and lists."""
        return {
            "strategy": self.strategy,
            "generator": self.generator.get_state(),
            "names": list(self._names),
            "pending": torch.tensor(self._pending, dtype=torch.int64, device="cpu").view(-1, 2),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state exactly, including the next samples."""
        if state["strategy"] != self.strategy:
            raise OptionError(
                f"the saved state samples by {state['strategy']!r}, this sampler by "
                f"{self.strategy!r}. Create it with strategy={state['strategy']!r}."
            )
        generator: Tensor = state["generator"]
        self.generator.set_state(generator.to("cpu", torch.uint8))
        self._names = list(state["names"])
        self._pending = state["pending"].tolist()
