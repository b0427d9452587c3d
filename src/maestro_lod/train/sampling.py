"""Which rank of which layer is trained next."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.errors import (
    OptionError,
    TrainingError,
    listed,
    require_seed,
    require_whole,
    suggest,
)
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.sizes.rank_order import order_ranks

if TYPE_CHECKING:
    from maestro_lod.train.ledger import Ledger

STRATEGIES = {
    "pairs": "every (layer, rank) pair once in random order, then again (the paper's)",
    "iid": "a (layer, rank) pair at random, all pairs equally likely",
    "several": "one to as many such pairs as there are layers, so that layers are cut together",
    "layer_uniform": "a layer at random, then a rank of it",
    "independent": "a rank of its own for every layer",
}


ALONE = 0.3  # of a run's epochs; for LeNet, on held-out data, better than none and 0.5


class RankSampler:
    """Draws the active ranks of one training step; reads the live ranks of its layers.

    `sample()` returns name -> active rank for the layers that are truncated, in most strategies
    one. Layers of rank 0 and frozen layers, which sampling cannot order, are passed over. Nothing
    needs to be rebuilt after a shrink: pairs that no longer exist are skipped.

    Randomness comes from a generator of its own; `state_dict` and `load_state_dict` restore it
    exactly.
    """

    def __init__(self, model: nn.Module, *, strategy: str = "pairs", seed: int = 0) -> None:
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise OptionError(
                f"sampling strategy {strategy!r} is not known.{suggest(str(strategy), STRATEGIES)} "
                f"Choose from {listed(STRATEGIES)}."
            )
        self._model, self._layers = model, require_low_rank(model)
        self.strategy = strategy
        self.alone = 0
        """How many epochs train the whole model alone, before anything is drawn."""
        self.generator = torch.Generator("cpu").manual_seed(require_seed(seed))
        self.left_out: set[str] = set()
        """Layers that are not drawn, because the model's forward never reaches them."""
        self._names: list[str] = []
        self._pending: list[list[int]] = []  # [layer index, rank] not yet drawn; the last is next

    # -- epochs that train the whole model alone ---------------------------------------------------

    def expect(self, epochs: int) -> None:
        """Plan for a run of so many epochs."""
        if self.alone:
            self.alone = round(ALONE * epochs)

    def waits(self, epoch: int, ledger: Ledger) -> bool:
        """Say whether nothing is drawn in an epoch, because the whole model is trained alone."""
        return epoch < self.alone

    def end_epoch(
        self, epochs: int, ledger: Ledger, optimizer: Optimizer, ema: AveragedModel | None
    ) -> None:
        """After so many epochs: put ranks into order once those alone are over."""
        if epochs == self.alone > 0:
            order_ranks(self._model, optimizer, ema)

    # -- drawing ---------------------------------------------------------------------------------

    def live_ranks(self) -> dict[str, int]:
        """Return the layers that can be drawn with their current ranks."""
        return {n: m.rank for n, m in self._layers.items() if self._drawable(n, 1)}

    def _drawable(self, name: str, rank: int) -> bool:
        layer = self._layers.get(name)
        if layer is None or name in self.left_out:
            return False
        return rank <= layer.rank and layer.u.requires_grad

    def chances(self) -> dict[str, list[float]]:
        """Return how likely a draw leaves each layer at rank 1, 2, … of those that it has."""
        ranks = self.live_ranks()
        pairs, layers = sum(ranks.values()), len(ranks)

        def at_least(rank: int, of: int) -> float:
            """How likely a layer has at least this rank active: no smaller one was drawn."""
            if self.strategy == "independent":
                return 1 - (rank - 1) / of
            if self.strategy == "layer_uniform":
                return 1 - (rank - 1) / (of * layers)
            missed = 1 - (rank - 1) / pairs
            if self.strategy == "several" and missed < 1:  # the mean of missed^1 … missed^layers
                return missed * (1 - missed**layers) / ((1 - missed) * layers)
            return missed

        return {
            name: [
                at_least(b, rank) - (at_least(b + 1, rank) if b < rank else 0.0)
                for b in range(1, rank + 1)
            ]
            for name, rank in ranks.items()
        }

    def sample(self) -> dict[str, int]:
        """Draw the active ranks of the next step."""
        if self.strategy == "pairs":
            return self._next_pair()
        ranks = self._require_ranks()
        if self.strategy == "independent":
            return {name: self._draw(rank) + 1 for name, rank in ranks.items()}
        if self.strategy == "layer_uniform":
            name = list(ranks)[self._draw(len(ranks))]
            return {name: self._draw(ranks[name]) + 1}
        count = self._draw(len(ranks)) + 1 if self.strategy == "several" else 1
        drawn: dict[str, int] = {}
        for _ in range(count):
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
                if self._drawable(self._names[index], rank):
                    return {self._names[index]: rank}
            ranks = self._require_ranks()
            self._names = list(ranks)
            pairs = [[i, b] for i, rank in enumerate(ranks.values()) for b in range(1, rank + 1)]
            order = torch.randperm(len(pairs), generator=self.generator, device="cpu")
            self._pending = [pairs[i] for i in order.tolist()]

    def fingerprint(self) -> str:
        """Return a short text that is the same where all draws to come are."""
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
            "alone": self.alone,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state exactly; the next draw is the one that would have come next."""
        if state["strategy"] != self.strategy:
            raise OptionError(
                f"the saved state samples by {state['strategy']!r}, this sampler by "
                f"{self.strategy!r}. Create it with strategy={state['strategy']!r}."
            )
        generator: Tensor = state["generator"]
        self.generator.set_state(generator.to("cpu", torch.uint8))
        self._names = list(state["names"])
        self._pending = state["pending"].tolist()
        # older states do not say: they have drawn from the first step on
        self.alone = require_whole("alone", state.get("alone", 0))
