"""The steps of a training: each at ranks that are drawn for it, counted epoch by epoch."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.distributed.shards import is_sharded
from maestro_lod.errors import LayerError, TrainingError, listed, require_bool, require_whole
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import activated, require_low_rank
from maestro_lod.train.example_recorder import FirstCall
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.optimizer_steps import call_after_steps
from maestro_lod.train.sampling import RankSampler

logger = logging.getLogger(__name__)


class SampledSteps:
    """Draws the ranks of each step, keeps them active while it lasts, and counts what was done."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, sampler: RankSampler, *, note_input: bool
    ) -> None:
        self.sampler, self._model = sampler, model
        self.count = 0
        """Steps in this epoch, as all counts here."""
        self.forwards = 0
        """Those in which a layer ran: one that was drawn, or was not seen to run before."""
        self.whole = 0
        """Those that trained the whole model."""
        self.optimized = False
        """Whether the optimizer has done a step."""
        call_after_steps(optimizer, self._note_optimized)
        self._layers = require_low_rank(model)
        self._unseen = dict(self._layers)  # layers that have not run in any step yet
        self._drawn: dict[LowRank, int] = {}
        self._whole_step = False
        self._active: ExitStack | None = None  # as long as a step lasts
        # of shards nobody can make the copy on which MACs are counted
        note_input = note_input and shard_group(model) is None
        self._first_call = FirstCall(model) if note_input else None

    @contextmanager
    def one(self, *, whole: bool) -> Iterator[dict[str, int]]:
        """Do one step in the `with` block; one that fails does not count."""
        drawn = self.begin(whole=whole)
        try:
            yield drawn
        except BaseException:
            self._deactivate()
            raise
        self.end()

    def begin(self, *, whole: bool) -> dict[str, int]:
        """Draw ranks and activate them, or all of them for a step that trains the whole model."""
        if self._active is not None:
            raise TrainingError(
                "a step has begun already: end_step(), or the end of its `with train.step():`, "
                "comes before the next one."
            )
        self._require_finite_weights()
        drawn = self.sampler.live_ranks() if whole else self.sampler.sample()
        self._whole_step = whole
        self._drawn = {self._layers[name]: rank for name, rank in drawn.items()}
        for layer in (*self._drawn, *self._unseen.values()):
            layer.__dict__["positions"] = None  # past nn.Module's slow setattr
        self._active = ExitStack()
        self._active.enter_context(activated(self._drawn))
        if self._first_call is not None:
            self._first_call.listening = True
        return drawn

    def end(self) -> None:
        """Make all ranks active again and count the step."""
        if self._active is None:
            raise TrainingError("no step has begun: begin_step() comes before end_step().")
        missed = any(layer.active_rank != min(r, layer.rank) for layer, r in self._drawn.items())
        self._deactivate()
        if missed:
            raise TrainingError(
                "end_step() was called where the ranks of begin_step() are not active, such as in "
                "another thread. Call both, and forward and backward, in the same one."
            )
        self.count += 1
        self.whole += self._whole_step
        ran = [name for name, layer in self._unseen.items() if layer.positions is not None]
        self.forwards += bool(ran) or any(layer.positions is not None for layer in self._drawn)
        for name in ran:
            del self._unseen[name]
            self.sampler.left_out.discard(name)

    def _deactivate(self) -> None:
        assert self._active is not None
        self._active.close()
        self._active = None
        if self._first_call is not None:
            self._first_call.listening = False

    def _require_finite_weights(self) -> None:
        """Refuse to go on from NaN weights; accelerators are not made to wait, the epoch's end is.

        It is the layer that the last step has sampled that is looked at.
        """
        last = next(iter(self._drawn), None)
        if last is None or last.u.device.type != "cpu" or is_sharded(last.u):
            return
        if not math.isfinite(last.u.detach().sum(dtype=torch.float32).item()):
            raise TrainingError(
                "the last step made weights NaN or infinite: its loss was not finite. Lower the "
                "learning rate or clip gradients, and go on from the last good checkpoint."
            )

    def require_some(self, epoch: int) -> None:
        """Refuse to end an epoch in which nothing was sampled."""
        if self.forwards == 0:
            raise TrainingError(
                f"no low-rank layer ran inside step() in epoch {epoch} ({self.count} steps): "
                "nothing was sampled. Put forward and backward inside `with train.step():`."
            )
        if not self.optimized:
            raise TrainingError(
                f"optimizer.step() was never called in epoch {epoch} ({self.count} steps): nothing "
                "was trained. Call it, on the optimizer that LoD was given, after each step."
            )

    def new_epoch(self) -> None:
        """Count from zero; layers that no forward has reached yet are not drawn from now on."""
        self.count = self.forwards = self.whole = 0
        self.optimized = False
        drawable = self.sampler.live_ranks()
        if unreached := [name for name in self._unseen if name in drawable]:
            self.sampler.left_out.update(unreached)
            warnings.warn(
                f"the forward never reached {listed(unreached)} in this epoch: they are not "
                "sampled until it does. Leave them dense with decompose(…, skip=…).",
                stacklevel=4,  # whoever ends the epoch
            )

    def _note_optimized(self) -> None:
        self.optimized = True

    @property
    def sampled(self) -> float:
        """The share of this epoch's steps that did not train the whole model."""
        return 1 - self.whole / self.count

    def chances(self) -> dict[str, list[float]]:
        """Return how likely a step of this epoch left each layer at rank 1, 2, …."""
        sampled = self.sampled
        return {
            name: [
                sampled * chance + (1 - sampled) * (b == len(of_ranks))
                for b, chance in enumerate(of_ranks, 1)
            ]
            for name, of_ranks in self.sampler.chances().items()
        }

    def measure(self, ledger: Ledger) -> None:
        """Let a ledger without MACs count those of the first input that was seen."""
        if self._first_call is None:
            return
        example, self._first_call.noted = self._first_call.noted, None
        if self.forwards:  # whatever was not seen by now, inside a compiled model, never will be
            self._first_call.remove()
            self._first_call = None
        if example is not None and ledger.dense_macs is None:
            try:
                ledger.measure(self._model, example)
            except LayerError as error:
                logger.warning("the ledger goes without MACs: %s Give LoD an example=.", error)

    def counts(self) -> dict[str, Any]:
        """Return the counts of this epoch, and what was seen to run, for a state."""
        return {
            "steps": self.count,
            "forwards": self.forwards,
            "whole": self.whole,
            "optimized": self.optimized,
            "unseen": list(self._unseen),
            "left_out": sorted(self.sampler.left_out),
        }

    def load_counts(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from a state."""
        counts = (require_whole(key, state[key]) for key in ("steps", "forwards", "whole"))
        self.count, self.forwards, self.whole = counts
        # older states do not say: what they do not know is taken for granted
        self.optimized = require_bool("optimized", state.get("optimized", True))
        self._unseen = {name: self._layers[name] for name in state.get("unseen", ())}
        self.sampler.left_out = {n for n in state.get("left_out", ()) if n in self._layers}
