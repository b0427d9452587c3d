"""The one stateful object: everything that a training run needs beside model and optimizer."""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map_only

from maestro_lod.cost import Call, Example, Ledger
from maestro_lod.errors import (
    LayerError,
    OptionError,
    TrainingError,
    listed,
    require_nonnegative,
    require_whole,
)
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import activated, require_all_active, require_low_rank, unwrapped
from maestro_lod.train.budget import Budget
from maestro_lod.train.penalty import prox_layers_, weighted_group_lasso
from maestro_lod.train.pressure import penalty_for
from maestro_lod.train.sampling import RankSampler
from maestro_lod.train.shrink import (
    clear_moments,
    cut,
    ranks_above,
    require_averaged,
    require_optimizer,
    require_unwrapped,
)

logger = logging.getLogger(__name__)


class LoD:
    """Trains a decomposed model: samples ranks, penalizes useless ones, removes them.

    >>> train = LoD(model, optimizer, penalty=64e-6)
    >>> for epoch in range(epochs):
    ...     for x, y in loader:
    ...         with train.step():
    ...             loss = F.cross_entropy(model(x), y) + train.penalty_loss()
    ...             loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     train.end_epoch()

    `penalty` is λ; `threshold` the importance at or below which ranks are removed; `sampling` a
    strategy of `RankSampler`; `proximal` replaces the penalty's gradient by its exact proximal
    step after every `optimizer.step()`, which reaches zero under any optimizer; `shrink=False`
    never removes ranks; `full_pass` adds a pass at full rank to every step, and `distill` then
    trains the sampled pass on its predictions: both go through `backward`. `ema` is an averaged
    copy that shrinks along. `example` is an input of the model for the ledger's MACs; without one
    the first batch is looked at, unless the model is compiled.

    `budget={"params": 0.2}` (or "macs", which need an `example`; a share of dense or a count)
    steers λ instead, in proximal mode and whatever the threshold, until the deployed model is
    within the budget and close to it; from then on there is no penalty, the ranks stay, and the
    weights heal: every other step trains the whole model. "steps" in it says after how many
    optimizer steps the model fits. Without it `fit` plans half of its run; in a loop of your own
    the first epoch is trained without pressure, and the model fits eight epochs later.

    `pressure=64` sets λ in units that mean about the same for every model; see `penalty_for`. It
    needs to know how long training lasts: `steps`, optimizer steps, which `fit` fills in.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        penalty: float = 0.0,
        threshold: float = 1e-7,
        seed: int = 0,
        sampling: str = "pairs",
        proximal: bool = False,
        shrink: bool = True,
        min_rank: int = 0,
        full_pass: bool = False,
        distill: bool = False,
        ema: AveragedModel | None = None,
        example: Example | None = None,
        budget: Mapping[str, float] | None = None,
        pressure: float = 0.0,
        steps: float | None = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise LayerError(
                "LoD was given a DistributedDataParallel wrapper. Give it the inner model, "
                "LoD(ddp.module, …), and wrap anew after each end_epoch()."
            )
        if distill and not full_pass:
            raise OptionError("distill=True needs the full pass as its teacher: full_pass=True.")
        if budget is not None and (penalty or not shrink):
            raise OptionError(
                "a budget steers the penalty itself and needs shrink=True: leave penalty= and "
                "shrink= out."
            )
        if require_nonnegative("pressure", pressure) and (penalty or budget is not None):
            other = "penalty" if penalty else "budget"
            raise OptionError(f"pressure={pressure:g} sets the penalty itself: leave {other}= out.")
        if steps is not None and not pressure:
            raise OptionError(f"steps={steps!r} is for pressure=, which is not given.")
        self.model = unwrapped(model)
        require_all_active(self.model, "training")
        self.optimizer = optimizer
        self.penalty = require_nonnegative("penalty", penalty)
        self.threshold = require_nonnegative("threshold", threshold)
        self.min_rank = max(require_whole("min_rank", min_rank), 0 if budget is None else 1)
        self.proximal, self.shrink, self.ema = proximal or budget is not None, shrink, ema
        self.full_pass, self.distill = full_pass, distill
        self.sampler = RankSampler(self.model, strategy=sampling, seed=seed)
        require_optimizer(self.model, optimizer)
        if ema is not None:
            require_averaged(ema)
        self.ledger = Ledger.of(self.model, example)
        self.budget = (
            None if budget is None else Budget.of(budget, self.model, self.ledger, self.min_rank)
        )
        self.pressure = pressure
        if pressure and steps is not None:
            self.expect(steps)
        self.epoch = 0
        self._layers = require_low_rank(self.model)
        self._steps = self._forwards = self._whole = 0  # in this epoch
        self._last_sampled: LowRank | None = None
        self._call: Call | None = None
        self._in_step = False
        self._example_hook: Any = None
        self._warned_of_floor = False
        if example is None:
            self._watch_for_example()
        if self.proximal:
            self._watch_optimizer()

    @property
    def history(self) -> list[dict[str, int]]:
        """The ranks that were in force in each finished epoch."""
        return [epoch.ranks for epoch in self.ledger.epochs]

    def expect(self, steps: float) -> None:
        """Set λ to the pressure for a training of so many optimizer steps; once, at its start.

        Where learning rates will change, it is the sum of their shares of the present ones.
        """
        if self.pressure and not self.penalty:
            self.penalty = penalty_for(
                self.pressure, self.model, self.optimizer, steps, proximal=self.proximal
            )

    # -- one step ------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[dict[str, int]]:
        """Draw the ranks of one step and keep them active inside the `with` block.

        The block must cover forward and backward: activation checkpointing runs the forward again.
        Yields what was drawn.
        """
        if self.full_pass:
            raise OptionError("full_pass=True needs two passes: use backward(forward, loss).")
        with self._sampled() as drawn:
            yield drawn

    @contextmanager
    def _sampled(self) -> Iterator[dict[str, int]]:
        self._require_finite_weights()
        if self.pressure and not self.penalty:
            raise OptionError(
                f"pressure={self.pressure:g} needs to know how long training lasts: "
                "LoD(…, steps=epochs * len(loader)), or train with fit()."
            )
        drawn = self.sampler.sample()
        if self._healing and self._steps % 2:
            drawn = {name: self._layers[name].rank for name in drawn}
            self._whole += 1
        layers = {self._layers[name]: rank for name, rank in drawn.items()}
        for layer in layers:
            layer.__dict__["positions"] = None  # past nn.Module's slow setattr
        self._in_step = True
        try:
            with activated(layers):
                yield drawn
        finally:
            self._in_step = False
        self._steps += 1
        self._forwards += any(layer.positions is not None for layer in layers)
        self._last_sampled = next(iter(layers))

    @property
    def _healing(self) -> bool:
        """Whether the model fits its budget: every other step then trains it whole."""
        return self.budget is not None and self.budget.phase in ("holding", "landed")

    def penalty_loss(self) -> Tensor:
        """Return λ times the group lasso, to be added to the loss; zero in proximal mode."""
        if self.proximal or self.penalty == 0.0:
            return next(iter(self._layers.values())).u.new_zeros(())
        return weighted_group_lasso(self._layers.values(), self.penalty)

    def backward(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Tensor:
        """Do the passes of one step, gradients included, and return the summed loss.

        >>> train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))

        With `full_pass` that is a pass at full rank and a sampled one, each with its own backward;
        otherwise the sampled one. The penalty is included. `weight` scales all of it: 1/k where
        the gradients of k batches are accumulated. `soft_loss(output, teacher)` is what `distill`
        trains the sampled pass on, given the output of the full one; without it that is the
        cross-entropy of scores (N, classes, …).
        """
        total: Tensor | float = 0.0
        if self.full_pass:
            output = forward()
            if self.distill and soft_loss is None:
                _require_class_scores(output)
            full_loss = _finite(loss(output) * weight)
            full_loss.backward()  # type: ignore[no-untyped-call]
            total = full_loss.detach()
        with self._sampled():
            sampled = forward()
            if self.distill:
                teacher = tree_map_only(Tensor, Tensor.detach, output)
                data_loss = (soft_loss or _soft_cross_entropy)(sampled, teacher)
            else:
                data_loss = loss(sampled)
            sampled_loss = _finite((data_loss + self.penalty_loss()) * weight)
            sampled_loss.backward()  # type: ignore[no-untyped-call]
        return sampled_loss.detach() + total

    def _require_finite_weights(self) -> None:
        """Refuse to go on from NaN weights; accelerators are not made to wait, see end_epoch."""
        if self._last_sampled is None or self._last_sampled.u.device.type != "cpu":
            return
        if not math.isfinite(self._last_sampled.u.detach().sum(dtype=torch.float32).item()):
            raise TrainingError(
                "the last step made weights NaN or infinite: its loss was not finite. Lower the "
                "learning rate or clip gradients, and go on from the last good checkpoint."
            )

    # -- one epoch -----------------------------------------------------------------------------

    def end_epoch(self) -> dict[str, int]:
        """Book the epoch's cost, remove useless ranks, and return how many each layer lost."""
        if self._forwards == 0:
            raise TrainingError(
                f"no low-rank layer ran inside step() in epoch {self.epoch} ({self._steps} steps): "
                "nothing was sampled. Put forward and backward inside `with train.step():`."
            )
        require_optimizer(self.model, self.optimizer)
        if self.shrink:
            require_unwrapped(self.model)
        keep = ranks_above(self.model, self.threshold, self.min_rank)
        if self.shrink and not any(keep.values()):
            raise TrainingError(
                f"every rank of every layer is at or below threshold={self.threshold}: nothing "
                f"would be left. Lower penalty={self.penalty} or set min_rank=1."
            )
        self._measure_from_first_batch()
        if self.budget is not None:
            keep = self.budget.end_epoch(self.model)
        whole = self._whole / self._steps
        chances = {
            name: [
                (1 - whole) * chance + whole * (b == len(of_ranks))
                for b, chance in enumerate(of_ranks, 1)
            ]
            for name, of_ranks in self.sampler.chances().items()
        }
        cost = self.ledger.epoch_cost(self.model, chances, full_pass=self.full_pass)
        lost = cut(self.model, keep, self.optimizer, self.ema) if self.shrink else {}
        self.ledger.epochs.append(cost)
        logger.info(
            "epoch %d: total rank %d, %d parameters; ranks removed: %s",
            self.epoch, sum(cost.ranks.values()), cost.params, lost or "none",
        )  # fmt: skip
        self.epoch += 1
        self._steps = self._forwards = self._whole = 0
        self._warn_of_floor(lost)
        return lost

    def land(self) -> None:
        """Fit the budget now, whatever the plan: ranks too many become zero until end_epoch().

        For a loop of your own that ends before the plan does: call it before the last
        `end_epoch()`, or better some epochs earlier, since from here on the weights heal.
        """
        if self.budget is None:
            raise OptionError('there is no budget to land on: LoD(…, budget={"params": 0.2}).')
        self.budget.land(self.model, self.ledger)
        self.penalty = 0.0

    def _warn_of_floor(self, lost: dict[str, int]) -> None:
        """Warn once if ranks cannot come down to the threshold at the current learning rate."""
        if self._warned_of_floor or not self.shrink or self.proximal or self.penalty == 0.0:
            return
        floors = {
            name: reachable_importance(layer, self.optimizer, self.penalty)
            for name, layer in self._layers.items()
            if name not in lost and layer.rank
        }
        stuck = {n: floor for n, floor in floors.items() if floor and floor > self.threshold}
        if stuck:
            self._warned_of_floor = True
            warnings.warn(
                f"at this learning rate {type(self.optimizer).__name__} keeps useless ranks at an "
                f"importance of about {max(stuck.values()):.0e}, above threshold="
                f"{self.threshold:g}: {listed(stuck)} will not shrink until it falls. Use "
                "proximal=True, or a larger threshold.",
                stacklevel=3,
            )

    # -- what is watched -----------------------------------------------------------------------

    def _watch_for_example(self) -> None:
        """Note the shapes of the first input that reaches the model inside a step."""
        note = _NoteCall(weakref.ref(self))
        self._example_hook = self.model.register_forward_pre_hook(note, with_kwargs=True)

    def _measure_from_first_batch(self) -> None:
        if self._example_hook is not None and self._forwards:
            self._example_hook.remove()
            self._example_hook = None
        if self._call is not None and self.ledger.dense_macs is None:
            try:
                self.ledger.measure(self.model, self._call)
            except LayerError as error:
                logger.warning("the ledger goes without MACs: %s Give LoD an example=.", error)
            self._call = None

    def _watch_optimizer(self) -> None:
        """Apply the proximal step after every optimizer step, as long as this object lives."""
        method = weakref.WeakMethod(self._proximal_step)

        def after_step(*_: Any) -> None:
            if (proximal_step := method()) is not None:
                proximal_step()

        self.optimizer.register_step_post_hook(after_step)

    def _proximal_step(self) -> None:
        if (found_inf := getattr(self.optimizer, "found_inf", None)) is not None and found_inf > 0:
            return  # GradScaler lets fused optimizers skip the step themselves
        rates = {id(p): float(g["lr"]) for g in self.optimizer.param_groups for p in g["params"]}
        pressed = self._layers
        if (budget := self.budget) is not None:
            trained = [rates.get(id(layer.u), 0.0) for layer in self._layers.values()]
            budget.after_step(self.model, self.ledger, max(trained))
            self.penalty = budget.penalty
            pressed = {n: layer for n, layer in pressed.items() if n not in budget.spared}
        if self.penalty == 0.0 or not pressed:
            return
        left = prox_layers_(
            {
                layer: (
                    rates.get(id(layer.u), 0.0) * self.penalty,
                    rates.get(id(layer.v), 0.0) * self.penalty,
                )
                for layer in pressed.values()
            }
        )
        for layer, rank in left.items():
            if rank < layer.rank:
                clear_moments(layer, rank, self.optimizer)

    # -- resume --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state as numbers, strings, lists and tensors; save it beside the model's."""
        self._measure_from_first_batch()
        return {
            "epoch": self.epoch,
            "penalty": self.penalty,
            "ranks": {name: layer.rank for name, layer in self._layers.items()},
            "steps": self._steps,
            "forwards": self._forwards,
            "whole": self._whole,
            "sampler": self.sampler.state_dict(),
            "ledger": self.ledger.state_dict(),
            "budget": None if self.budget is None else self.budget.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state exactly; load the model's and the optimizer's state first."""
        given = state if isinstance(state, Mapping) else {}
        parts = (
            "epoch", "penalty", "ranks", "steps", "forwards", "whole", "sampler", "ledger",
            "budget",
        )  # fmt: skip
        if missing := [part for part in parts if part not in given]:
            raise TrainingError(
                f"this is no state of a LoD: it has no {listed(missing)}. Give what its "
                "state_dict() returned."
            )
        here = {name: layer.rank for name, layer in self._layers.items()}
        if here != state["ranks"]:
            differing = [n for n in here | state["ranks"] if here.get(n) != state["ranks"].get(n)]
            raise TrainingError(
                f"the saved state has other ranks than the model at {listed(differing)}. Load the "
                "model's state_dict, saved at the same moment, before this one."
            )
        if (self.budget is None) != (state["budget"] is None):
            saved, here_ = ("no", "a") if self.budget is not None else ("a", "no")
            raise TrainingError(
                f"the saved state has {saved} budget, this LoD {here_} one. Create it as it was."
            )
        require_optimizer(self.model, self.optimizer)
        self.sampler.load_state_dict(state["sampler"])
        self.ledger.load_state_dict(state["ledger"])
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])
        self.epoch, self.penalty = int(state["epoch"]), float(state["penalty"])
        self._steps, self._forwards = int(state["steps"]), int(state["forwards"])
        self._whole = int(state["whole"])


class _NoteCall:
    """A forward hook that notes one call for a `LoD`; a pickled or copied model's notes nothing."""

    def __init__(self, lod: weakref.ref[LoD] | None = None) -> None:
        self._lod = lod

    def __reduce__(self) -> tuple[type[_NoteCall], tuple[()]]:
        return _NoteCall, ()

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._lod is None:
            return  # inside a compiled graph this hook must stay without effect
        lod = self._lod()
        if lod is not None and lod._in_step and lod._call is None:
            lod._call = Call(args, kwargs).on_meta()


def _soft_cross_entropy(output: Tensor, teacher: Tensor) -> Tensor:
    return F.cross_entropy(output, teacher.softmax(1))


def _require_class_scores(output: Any) -> None:
    """Refuse an output of which nobody can tell where the scores of classes are."""
    way_out = (
        "Say how to compare it: backward(…, soft_loss=lambda output, teacher: …), or in fit a loss "
        "with a method soft(output, teacher, target)."
    )
    if not isinstance(output, Tensor) or output.ndim in (0, 1, 3):  # 3: classes second or last?
        given = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise OptionError(
            f"distill=True compares scores of shape (N, classes) or (N, classes, height, width); "
            f"the output is {given}. {way_out}"
        )
    if output.shape[1] < 2:
        raise OptionError(
            "distill=True compares scores of classes, but the output has a single score, from "
            f"which nothing would be learned. {way_out}"
        )


def _finite(loss: Tensor) -> Tensor:
    if not bool(loss.detach().isfinite().all()):
        raise TrainingError(
            f"the loss is {loss.detach()}. Lower the learning rate or clip gradients; the weights "
            "are as they were before this step."
        )
    return loss


_SWING = {  # of one weight around zero, in learning rates; from simulations of the penalty alone
    torch.optim.Adam: 0.036, torch.optim.AdamW: 0.036, torch.optim.RAdam: 0.036,
    torch.optim.NAdam: 0.25, torch.optim.Adamax: 0.008, torch.optim.RMSprop: 0.35,
}  # fmt: skip


def reachable_importance(layer: LowRank, optimizer: Optimizer, penalty: float) -> float | None:
    """Estimate where the importance of useless ranks stalls under penalty gradients alone.

    A gradient step never reaches zero but swings around it, by an amount that grows with the
    learning rate. The constants fit simulations of the penalty alone, so this is an order of
    magnitude. None for an optimizer that was not simulated.
    """
    groups = [g for g in optimizer.param_groups if any(p is layer.u for p in g["params"])]
    if not groups:
        return None
    rate = float(groups[0]["lr"])
    if isinstance(optimizer, torch.optim.SGD):
        return float((0.3 * layer.rank * rate * penalty) ** 2)
    swing = _SWING.get(type(optimizer))
    if swing is not None:
        return float((swing * rate) ** 2 * (layer.u.numel() * layer.v.numel()) ** 0.5)
    return None
