"""Every size from one training: train the whole model, order its ranks by data, train all sizes.

Two phases. In the *whole* phase every step is a step of the dense model, at dense cost. Then the
ranks are ordered by what the layers make of training data, and measured losses decide how many each
layer keeps at each size. In *consolidation* each step trains one size, drawn at random, on the
target and on what the frozen whole model says. A budget is the same with one size.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.agreement import Agreement
from maestro_lod.distributed.collectives import broadcast_object, peer_failure_context
from maestro_lod.distributed.ddp import find_wrappers, renew
from maestro_lod.distributed.fsdp import adopt_shards, reshard, shard_group
from maestro_lod.distributed.shards import fill, is_sharded
from maestro_lod.errors import (
    LayerError,
    MaestroError,
    OptionError,
    TrainingError,
    listed,
    require_seed,
    require_whole,
)
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import (
    activated,
    at_ranks,
    low_rank_layers,
    ranks,
    require_all_active,
    unwrapped,
)
from maestro_lod.model.cost import Cost, count_params
from maestro_lod.model.inputs import (
    Batch,
    Example,
    ModelInputs,
    model_device,
    on_device,
    require_number,
    split_batch,
)
from maestro_lod.model.replace import copy_whole
from maestro_lod.model.structure import read_structure
from maestro_lod.model.surgery import decompose
from maestro_lod.sizes.allocation import frozen_layers, smallest_cost
from maestro_lod.sizes.averages import require_no_other_average
from maestro_lod.sizes.calibrated_allocation import rank_energies
from maestro_lod.sizes.calibration import calibrate
from maestro_lod.sizes.latency import all_dense
from maestro_lod.sizes.measured_allocation import (
    CostKind,
    convex_losses,
    count_measurements,
    measure_losses,
    nested_ranks,
)
from maestro_lod.sizes.outputs import SoftLoss, scores_loss
from maestro_lod.sizes.replay import alone_with
from maestro_lod.train.consolidation import Pace, Rungs, comparison_for
from maestro_lod.train.diagnostics import (
    require_finite_loss,
    require_finite_parameters,
    require_loss,
    require_ranks_to_train,
    require_trainable,
)
from maestro_lod.train.evaluate import recalibrate
from maestro_lod.train.ledger import EpochCost, Ledger
from maestro_lod.train.method import RunPlan, require_saved_by
from maestro_lod.train.progress import MethodRecord
from maestro_lod.train.shrink import (
    cut,
    require_averaged,
    require_optimizer,
    unwrapped_optimizer,
)
from maestro_lod.train.unfactored import Unfactored

logger = logging.getLogger(__name__)

_SECOND = 0.4
"""Epochs of consolidation per epoch of the whole phase; with it a run costs 1.3 to 1.55 dense
trainings, and 0.5 brings about 0.1 pp more."""
_SIZES = 16  # that are trained together, where the smallest is all that is given
_TASK = 0.2
"""The weight of the target in consolidation; the rest is the teacher's."""
_CALIBRATED, _MEASURED = 48, 4  # training batches


class Elastic:
    """Trains a decomposed model as a whole, then all of its sizes together.

    >>> train = Elastic(model, optimizer, smallest=0.1)
    >>> fit(model, loader, optimizer=optimizer, method=train, epochs=20)

    `fit(epochs=20)` trains the whole model for 20 epochs, exactly as dense training would, and adds
    8 epochs of consolidation. A loop that decides the number of epochs itself counts both: two
    sevenths of them are consolidation. It calls `start` with a `RunPlan` first, `backward` for each
    batch, and `end_epoch`.

    Args:
        model: A model with low-rank layers, of all ranks.
        optimizer: The optimizer of the model; the learning rate of consolidation is derived from
            its initial one.
        smallest: The smallest size, as a share of the dense model: sizes down to it are trained.
        sizes: Sizes to train instead, each a share of the dense model or, as an int, a count. The
            model is cut to the largest when consolidation begins.
        cost: The cost that sizes limit, "params" or "macs".
        trained: Whether the model is trained already, so that all epochs are consolidation.
        soft_loss: How far an output is from a teacher's: soft_loss(output, teacher). By default the
            loss says so, or the output is named `logits`; else sizes learn from the target alone.
        seed: Of the draws of sizes.
        ema: An averaged copy of the model. It starts again with consolidation, at the same ranks:
            averages of factors that belong to other ranks mean nothing.
        example: An input of the model, for MACs; without one the first training batch is taken.

    Raises:
        OptionError: An option is out of range, a size cannot be reached, or nothing can be trained.
        TrainingError: The optimizer does not hold the factors, or does not support a shrink.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        smallest: float | None = None,
        sizes: Sequence[float | int] | None = None,
        cost: CostKind = "params",
        trained: bool = False,
        soft_loss: SoftLoss | None = None,
        seed: int = 0,
        ema: AveragedModel | None = None,
        example: Example | None = None,
    ) -> None:
        self.smallest, self.sizes = _require_sizes(smallest, sizes)
        if cost not in ("params", "macs"):
            raise OptionError(f"cost={cost!r} is not known. Choose 'params' or 'macs'.")
        self.cost, self.trained, self._soft_loss = cost, trained, soft_loss
        self.model = unwrapped(model)
        self.optimizer = unwrapped_optimizer(optimizer)
        require_all_active(self.model, "training")
        adopt_shards(self.model)
        require_optimizer(self.model, self.optimizer)
        require_trainable(self.model)
        self._layers: dict[str, LowRank] = require_ranks_to_train(self.model, 1, "Elastic")
        self.ema = None if ema is None else require_averaged(ema)
        self.ledger = Ledger.open_for(self.model, example)
        if self.ledger.dense_macs is not None or cost == "params":
            self._limits()  # refuses sizes that cannot be reached
        self._unfactored = Unfactored(self.model, self.optimizer, self.ema)
        self._agreement, self._pace = Agreement(self.model), Pace(self.optimizer, len(self._layers))
        self.rungs = Rungs(require_seed(seed))
        self.phase = "whole"
        """Of the next step: "whole" or "consolidation"."""
        self._ended_phase = self.phase
        self.epoch = 0
        self.epochs: int | None = None
        """Of both phases; None before `start`."""
        self.whole_epochs = 0
        self.teacher: nn.Module | None = None
        """The frozen whole model, dense, while there is consolidation."""
        self._plan: RunPlan | None = None
        self._losses: dict[str, Tensor] = {}  # of each layer at 0, 1, … ranks
        self._began: list[float] = []  # the loss of each size when consolidation began
        self._searched = 0.0  # what calibration and measuring cost, in dense forwards of a batch
        self._steps_before = 0  # optimizer steps when the epoch began
        self._passes = 0  # in this epoch

    # -- the plan ------------------------------------------------------------------------------

    def total_epochs(self, epochs: int) -> int:
        """Return the epochs of both phases, given those that train the whole model.

        A model that is trained already has consolidation alone.
        """
        if self.trained or epochs == 0:
            return epochs
        return epochs + max(1, round(_SECOND * epochs))

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        """Begin the run, or resume it if a state was loaded.

        Args:
            model: The model that this method was made for.
            optimizer: The optimizer that it was made for.
            plan: The epochs of both phases, with the training batches and the loss.

        Raises:
            OptionError: The plan lacks something, or a size cannot be reached.
        """
        if self.optimizer is not unwrapped_optimizer(optimizer) or self.model is not unwrapped(
            model
        ):
            raise OptionError(
                "Elastic was created for another model or optimizer than fit has. Give both the "
                "same."
            )
        if plan.batches is None or plan.loss is None:
            raise OptionError(
                "Elastic orders ranks by training batches, and the plan has none. Give "
                "RunPlan(epochs, steps, batches=loader, loss=loss)."
            )
        self._plan = plan
        if self.phase == "consolidation" and plan.epochs > max(self.epoch, self.epochs or 0):
            raise OptionError(
                f"consolidation was planned for a run of {self.epochs} epochs, and cannot last "
                f"until epoch {plan.epochs}. Give the epochs that the run began with."
            )
        if self.epochs is None or self.phase == "whole":
            self.epochs = plan.epochs
            second = plan.epochs if self.trained else consolidation_epochs(plan.epochs)
            self.whole_epochs = plan.epochs - second
        self._count_macs(plan)
        self._limits()  # of MACs that were not known before
        if self.phase == "whole" and self.epoch >= self.whole_epochs:
            self._begin_consolidation()
        elif self.phase == "whole" and self.epoch == 0 and not self._unfactored.names:
            self._unfactored.begin()

    def ranks_at(self, size: float | int) -> dict[str, int]:
        """Return the ranks of a size, between those of the sizes that are trained next to it.

        Args:
            size: A share of the dense model or, as an int, a count.

        Raises:
            OptionError: The size is not among those that were trained, from smallest to largest.
        """
        if not self.rungs.ranks:
            raise OptionError("ranks have no order before consolidation. Train on until it begins.")
        costs = self.ledger.costs(self.model)
        dense = getattr(costs.dense, self.cost)
        limit = size if isinstance(size, int) else int(size * dense)
        limits = self.rungs.limits
        if not limits[-1] <= limit <= limits[0]:
            raise OptionError(
                f"size={size!r} was not trained. Give {limits[-1] / dense:.4g} to "
                f"{limits[0] / dense:.4g}, shares of the dense model."
            )
        above = max(i for i, each in enumerate(limits) if each >= limit)
        if limits[above] == limit:
            return dict(self.rungs.ranks[above])
        larger, smaller = self.rungs.ranks[above : above + 2]
        choices = {name: range(smaller[name], rank + 1) for name, rank in larger.items()}
        found = nested_ranks(self.model, costs, self._losses, [limit], self.cost, choices=choices)
        return found[limit]

    def compare_with(self, dense: Cost) -> None:
        """Report relative costs with respect to `dense` instead of this model's own dense form."""
        self.ledger.other_dense = dense.params, dense.macs

    def _count_macs(self, plan: RunPlan) -> None:
        if self.ledger.dense_macs is not None:
            return
        try:
            inputs, _ = split_batch(_first(plan.batches, 1)[0])
            self.ledger.measure(self._whole_model(), inputs)
        except LayerError as error:
            if self.cost == "macs":
                raise
            logger.warning("the ledger goes without MACs: %s Give Elastic an example=.", error)

    def _limits(self) -> list[int]:
        """Return what each size may cost, from the largest to the smallest."""
        costs = self.ledger.costs(self.model)
        dense = getattr(costs.dense, self.cost)
        least = smallest_cost(self.model, costs, self.cost)
        if self.smallest is not None:
            bottom = max(self.smallest, min(1.0, least / dense))
            count = _SIZES if bottom < 1.0 else 1
            return [int(dense * bottom ** (i / max(1, count - 1))) for i in range(count)]
        limits = [s if isinstance(s, int) else int(s * dense) for s in self.sizes]
        if max(limits) >= dense:
            raise OptionError(
                f"a size of {max(limits):,} {self.cost} is not below the dense model's {dense:,}. "
                "Give a share below 1 or a smaller count."
            )
        if min(limits) < least:
            raise self._too_small(min(limits), least, dense)
        return sorted(set(limits), reverse=True)

    def _too_small(self, limit: int, least: int, dense: int) -> OptionError:
        needs = f"the model needs {least:,}, a share of {math.ceil(1e4 * least / dense) / 1e4}"
        if frozen := frozen_layers(self.model):
            return OptionError(
                f"a size of {limit:,} {self.cost} cannot be reached: frozen layers keep all their "
                f"ranks ({listed(frozen)}), and with rank 1 in every other layer {needs}. Call "
                "requires_grad_(True) on them, or give at least that."
            )
        return OptionError(
            f"a size of {limit:,} {self.cost} cannot be reached: with rank 1 in every layer "
            f"{needs}. Give at least that."
        )

    # -- one step ------------------------------------------------------------------------------

    def backward(
        self,
        forward: Callable[..., Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: SoftLoss | None = None,
    ) -> Tensor:
        """Do the passes over one batch, gradients included, and return the loss.

        >>> train.backward(lambda m=model: m(x), lambda output: F.cross_entropy(output, y))

        Args:
            forward: Runs the model on the batch or, called with a model, that one: the teacher.
            loss: The loss of an output.
            weight: Scales the gradients: 1/k where those of k batches are accumulated.
            soft_loss: How far an output is from the teacher's; it overrides the method's own.
        """
        with self.step():
            wanted = None
            if self.phase == "consolidation":
                with torch.no_grad():
                    wanted = forward(self.teacher)
            output = forward()
            value = require_loss(loss(output))
            compare = self._soft_loss or soft_loss or _by_name(output)
            if self.phase == "consolidation" and compare is not None:
                value = self.mixed_loss(value, compare(output, wanted))
            del output, wanted  # freed before the backward if the loss permits
            value = require_finite_loss(value)
            (value * weight).backward()  # type: ignore[no-untyped-call]
        return value.detach() * weight

    @contextmanager
    def step(self) -> Iterator[None]:
        """Activate the ranks of a step inside the `with` block: one forward and one backward.

        `backward` does this itself. In a loop that does the passes, the loss in consolidation is
        `mixed_loss`, with the output of `teacher` for the same inputs.

        >>> with train.step():
        >>>     F.cross_entropy(model(x), y).backward()

        Raises:
            TrainingError: `start` was not called, or the processes do not agree.
        """
        with peer_failure_context():
            if self._plan is None:
                raise TrainingError("no plan is known yet. Call start(…) before the first step.")
            self._agreement.before_step(self)
            self._passes += 1
            drawn: Mapping[str, int] = {}
            if self.phase == "consolidation":
                drawn = self.rungs.draw()
                self._pace.trains(self.rungs.share)
            with activated({self._layers[name]: rank for name, rank in drawn.items()}):
                yield

    def mixed_loss(self, loss: Tensor, soft_loss: Tensor) -> Tensor:
        """Return the loss of consolidation, of a target and of the distance to the teacher.

        Args:
            loss: The loss of the output with its target.
            soft_loss: How far the output is from the teacher's, on the same scale.
        """
        return _TASK * loss + (1 - _TASK) * soft_loss

    @property
    def steps(self) -> int:
        """The optimizer steps so far."""
        return self._pace.all_steps

    # -- one epoch -----------------------------------------------------------------------------

    def end_epoch(self, *, last: bool = False) -> None:
        """Book the epoch's cost; begin consolidation if the whole phase is over.

        After the last epoch of consolidation the weights are those that it began with, if these
        have the lower loss at the sizes that were trained.
        """
        if self._plan is None:
            raise TrainingError("no plan is known yet. Call start(…) before the first step.")
        self._agreement.end_epoch(self)
        if self._pace.all_steps == self._steps_before:
            raise TrainingError(
                f"optimizer.step() was never called in epoch {self.epoch} ({self._passes} "
                "batches): nothing was trained. Call it, on the optimizer that Elastic was given."
            )
        require_finite_parameters(self.model)
        self.ledger.epochs.append(self._epoch_cost())
        self.epoch += 1
        self._ended_phase = self.phase
        steps = self._pace.all_steps - self._steps_before
        self._steps_before, self._passes = self._pace.all_steps, 0
        if self.phase == "whole" and (last or self.epoch == self.whole_epochs):
            self._begin_consolidation(steps)
        elif last:
            self._keep_the_better()
        self._agreement.new_epoch()

    def _epoch_cost(self) -> EpochCost:
        """Return the cost of this epoch's steps, with the teacher and the search before them."""
        cost = self.ledger.epoch_cost(self.model, self._chances())
        if self.phase == "whole":
            return cost
        assert self.teacher is not None
        params = cost.params + count_params(self.teacher)
        if (dense := self.ledger.dense_macs) is None:
            return replace(cost, params=params)
        # a step counts as its forward; what has no backward costs a third of that
        forwards = 1 + self._searched / max(1, self._passes)
        self._searched = 0.0
        macs, executed = cost.macs or 0.0, cost.executed_macs or 0.0
        extra = forwards * dense / 3
        return replace(cost, params=params, macs=macs + extra, executed_macs=executed + extra)

    def _chances(self) -> dict[str, list[float]]:
        """Return how likely a step leaves each layer at rank 1, 2, ….

        An empty mapping stands for all ranks.
        """
        if self.phase == "whole":
            return {}
        chances = {name: [0.0] * layer.rank for name, layer in self._layers.items()}
        for drawn, chance in zip(self.rungs.ranks, self.rungs.chances(), strict=True):
            for name, rank in drawn.items():
                if rank:
                    chances[name][rank - 1] += chance
        return chances

    # -- from the whole model to its sizes -----------------------------------------------------

    def _begin_consolidation(self, steps_per_epoch: int | None = None) -> None:
        """Order ranks by data, choose those of each size, and freeze the whole model."""
        assert self._plan is not None and self.epochs is not None
        require_no_other_average(self.model, self.ema)
        self.teacher = self._frozen_copy()
        batches = _first(self._plan.batches, _CALIBRATED)
        recalibrate(self.teacher, batches)
        twin, energies = self._decomposed(batches)
        self._unfactored.hold(())
        self._take_over(twin, factors_only=True)
        objective, measured = self._objective(batches[:_MEASURED]), self._whole_model()
        costs, whole = self.ledger.costs(self.model), ranks(self.model)
        losses = measure_losses(measured, objective, energies)
        self._losses = self._agreed(convex_losses(self.model, costs, losses, self.cost))
        limits = self.rungs.limits = self._limits()
        self.rungs.dense = getattr(costs.dense, self.cost)
        found = nested_ranks(self.model, costs, self._losses, limits, self.cost)
        if self.smallest is not None:
            found[limits[0]] = whole
        self.rungs.ranks = self._agreed([found[limit] for limit in limits])
        self._began = self._agreed(self._losses_of_sizes(objective, measured))
        evaluated = count_measurements(self.model) + len(limits)
        self._searched = 3.0 * len(batches) + evaluated * len(batches[:_MEASURED])
        if self.smallest is None:
            largest, wrappers = self.rungs.ranks[0], self._agreement.wrappers
            cut(self.model, largest, self.optimizer, self.ema, wrappers)
        self._restart_average()
        steps = self._plan.steps_per_epoch or steps_per_epoch
        if steps is None:
            raise OptionError(
                "the training data has no length, so consolidation cannot plan its learning rate. "
                "Give RunPlan(epochs, steps_per_epoch, …)."
            )
        self._pace.begin(max(1, self.epochs - self.epoch) * steps)
        self.phase = "consolidation"

    def _restart_average(self) -> None:
        """Let the averaged copy be the model, until its next update."""
        if self.ema is not None:
            averaged = unwrapped(self.ema.module)
            averaged.load_state_dict(self.model.state_dict())
            for layer in low_rank_layers(averaged).values():
                layer.identity_factor = None
            self.ema.n_averaged.zero_()

    def _whole_model(self) -> nn.Module:
        """Return the model or, if it is sharded, a copy with whole parameters."""
        return self.model if shard_group(self.model) is None else copy_whole(self.model)

    def _frozen_copy(self) -> nn.Module:
        """Return the whole model, dense and frozen; parameters that are not trained are shared."""
        teacher = all_dense(self._whole_model()).eval()
        for name, parameter in self.model.named_parameters():
            if is_sharded(parameter):
                continue
            if not parameter.requires_grad and name.rpartition(".")[0] not in self._layers:
                module, _, key = name.rpartition(".")
                try:
                    owner = teacher.get_submodule(module)
                except AttributeError:
                    continue
                if isinstance(owner._parameters.get(key), nn.Parameter):
                    owner._parameters[key] = parameter
        return teacher.requires_grad_(False)

    def _decomposed(self, batches: Sequence[Batch]) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the whole model with ranks ordered by data, and what each rank contributes."""
        assert self._plan is not None and self._plan.loss is not None and self.teacher is not None
        names = {name for name, layer in self._layers.items() if layer.rank}
        shared = any(form.kind == "shared" for form in read_structure(self.model).values())
        chosen: dict[str, Any] = {
            "only": lambda name, module: name in names,
            "tied": "share" if shared else "keep",
        }
        twin = copy.deepcopy(self.teacher).requires_grad_(True)  # which moments of gradients need
        calibration = calibrate(twin, batches, loss=self._plan.loss, **chosen)
        modules = dict(twin.named_modules())  # without parts of layers that hold several weights
        energies = rank_energies({n: modules.get(n, self._layers[n]) for n in names}, calibration)
        full = {name: self._layers[name].rank for name in names}
        twin = decompose(twin, ranks=full, calibration=calibration, **chosen)
        nothing = {n: torch.zeros(0) for n in self._layers.keys() - names}
        return twin, self._agreed(energies | nothing)

    @torch.no_grad()
    def _take_over(self, twin: nn.Module, *, factors_only: bool) -> None:
        """Copy what is trained from a model of the same structure, of which this may be a part."""
        reshard(self.model)
        theirs = dict(twin.named_parameters()) | dict(twin.named_buffers())
        factors = {
            f"{name}.{factor}": dim for name in self._layers for factor, dim in (("u", 1), ("v", 0))
        }
        for name, mine in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if name in factors and mine.numel():
                if mine.requires_grad:
                    dim = factors[name]
                    fill(mine, self._agreed(theirs[name].narrow(dim, 0, mine.shape[dim])))
            elif not factors_only and name in theirs:
                fill(mine, theirs[name])

    def _agreed(self, value: Any) -> Any:
        """Return what the first process has, in all processes."""
        group = self._agreement.group
        return value if group is None else broadcast_object(0, value, group)

    def _objective(self, batches: Sequence[Batch]) -> Callable[[nn.Module], float]:
        """Return what tells the consolidation loss of a model on some batches."""
        assert self._plan is not None and self._plan.loss is not None
        loss, device = self._plan.loss, model_device(self.model)
        compare = comparison_for(loss)
        pairs = [on_device(split_batch(batch), device) for batch in batches]
        assert self.teacher is not None
        with alone_with(self.teacher):
            wanted = [ModelInputs.wrap(inputs).call(self.teacher) for inputs, _ in pairs]

        def told(model: nn.Module) -> float:
            total = 0.0
            for (inputs, target), teacher in zip(pairs, wanted, strict=True):
                output = ModelInputs.wrap(inputs).call(model)
                value = loss(output, target)
                if (by_name := self._soft_loss or _by_name(output)) is not None:
                    value = _TASK * value + (1 - _TASK) * by_name(output, teacher)
                elif compare is not None:
                    value = _TASK * value + (1 - _TASK) * compare(output, teacher, target)
                total += require_number(value, "loss")
            return total / len(pairs)

        return told

    def _losses_of_sizes(
        self, objective: Callable[[nn.Module], float], model: nn.Module | None = None
    ) -> list[float]:
        model = self._whole_model() if model is None else model
        with alone_with(model):
            found = []
            for rung in self.rungs.ranks:
                with at_ranks(model, rung):
                    found.append(objective(model))
        return found

    def _keep_the_better(self) -> None:
        """Go back to the weights that consolidation began with if their sizes are better."""
        assert self._plan is not None and self.teacher is not None
        batches = _first(self._plan.batches, _CALIBRATED)
        now = self._agreed(self._losses_of_sizes(self._objective(batches[:_MEASURED])))
        if all(map(math.isfinite, now)) and sum(now) <= sum(self._began):
            return
        logger.warning(
            "consolidation has raised the mean loss of its sizes from %.4g to %.4g: the weights "
            "from before it are kept. Lower the learning rate.",
            sum(self._began) / len(now), sum(now) / len(now),
        )  # fmt: skip
        self._take_over(self._decomposed(batches)[0], factors_only=False)
        self._restart_average()

    # -- what is known -------------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """Return what must be the same in all processes that train the model."""
        drawn = int(self.rungs.generator.get_state().long().sum())
        return {
            "the ranks of the model": ranks(self.model),
            "the options of Elastic": f"smallest={self.smallest!r} sizes={self.sizes!r} "
            f"cost={self.cost} trained={self.trained} phase={self.phase}",
            "the sizes to draw (seed and steps so far)": (drawn, self.rungs.ranks),
        }

    def record(self) -> MethodRecord:
        """Return what the model is and would cost now, deployed with all of its ranks."""
        teacher = 0 if self.teacher is None else count_params(self.teacher)
        dense = self.ledger.reference[0 if self.cost == "params" else 1]
        only = self.rungs.limits[0] if len(self.rungs.limits) == 1 else None
        return MethodRecord(
            **self.ledger.sizes(self.model),
            ranks=ranks(self.model),
            budget=only / dense if only and dense else None,
            phase=self._ended_phase,
            others={"teacher_params": teacher} if teacher else {},
        )

    def training_cost(self) -> dict[str, float | None]:
        """Return what training has cost so far, relative to dense training of the whole phase.

        MACs count both phases, the teacher, and the search; parameters are a mean over epochs.
        """
        scale = self.epoch / (min(self.epoch, self.whole_epochs) or self.epoch or 1)
        return {
            kind: value if value is None or kind == "relative_params" else scale * value
            for kind, value in self.ledger.relative().items()
        }

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state as numbers, strings, lists, mappings and tensors."""
        return {
            "epoch": self.epoch,
            "epochs": self.epochs,
            "whole_epochs": self.whole_epochs,
            "phase": self.phase,
            "ended_phase": self._ended_phase,
            "ranks": ranks(self.model),
            "unfactored": self._unfactored.names,
            "pace": self._pace.state_dict(),
            "rungs": self.rungs.state_dict(),
            "losses": {name: loss.clone() for name, loss in self._losses.items()},
            "began": [*self._began],
            "searched": self._searched,
            "steps_before": self._steps_before,
            "passes": self._passes,
            "teacher": None if self.teacher is None else self.teacher.state_dict(),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state exactly; load the model's and the optimizer's state first."""
        require_saved_by("Elastic", state)
        _require_state(state, ranks(self.model))
        before = self.state_dict()
        try:
            self._restore(state)
        except Exception as error:
            self._restore(before)
            if isinstance(error, MaestroError):
                raise
            raise TrainingError(
                f"this is not a state of Elastic ({error!r}). Give one from its state_dict()."
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        epochs, teacher = state["epochs"], state["teacher"]
        self.epochs = None if epochs is None else require_whole("epochs", epochs)
        self.epoch = require_whole("epoch", state["epoch"])
        self.whole_epochs = require_whole("whole_epochs", state["whole_epochs"])
        self.phase, self._ended_phase = str(state["phase"]), str(state["ended_phase"])
        self._unfactored.hold(state["unfactored"])
        self._pace.load_state_dict(state["pace"])
        self.rungs.load_state_dict(state["rungs"])
        self._losses = dict(state["losses"])
        self._began = [float(loss) for loss in state["began"]]
        self._searched = float(state["searched"])
        self._steps_before = require_whole("steps_before", state["steps_before"])
        self._passes = require_whole("passes", state["passes"])
        self.ledger.load_state_dict(state["ledger"])
        self.teacher = None
        if teacher is not None:
            self.teacher = self._frozen_copy()
            self.teacher.load_state_dict(teacher)
        for wrapper in find_wrappers(self.model):
            renew(wrapper)  # whose buckets are of other ranks if the model's state was


_STATE = (
    "epoch", "epochs", "whole_epochs", "phase", "ranks", "unfactored", "pace", "rungs", "losses",
    "teacher", "ledger",
)  # fmt: skip


def _require_state(state: Any, here: dict[str, int]) -> None:
    given = state if isinstance(state, Mapping) else {}
    if missing := [part for part in _STATE if part not in given]:
        raise TrainingError(
            f"this is not a state of Elastic: it has no {listed(missing)}. Give one from its "
            "state_dict()."
        )
    if (saved := state["ranks"]) != here:
        differing = [name for name in {**here, **saved} if here.get(name) != saved.get(name)]
        raise TrainingError(
            f"the saved state has other ranks than the model at {listed(differing)}. Load the "
            "model's state_dict, saved at the same moment, before this one."
        )


def _require_sizes(
    smallest: float | None, sizes: Sequence[float | int] | None
) -> tuple[float | None, tuple[float | int, ...]]:
    """Return what is to be trained: down to the smallest size, or these."""
    if sizes is None:
        smallest = 0.1 if smallest is None else smallest
        if not isinstance(smallest, float) or not 0.0 < smallest < 1.0:
            raise OptionError(
                f"smallest={smallest!r} must be a share of the dense model between 0 and 1, such "
                "as 0.1."
            )
        return smallest, ()
    if smallest is not None:
        raise OptionError(f"smallest={smallest!r} and sizes={sizes!r} exclude each other.")
    for size in sizes:
        share = isinstance(size, float) and 0.0 < size < 1.0
        if not share and (isinstance(size, bool | float) or not isinstance(size, int) or size < 1):
            raise OptionError(
                f"size {size!r} must be a share of the dense model between 0 and 1, or a count."
            )
    if not sizes:
        raise OptionError("sizes=[] leaves nothing to train. Give sizes such as [0.5, 0.25].")
    return None, tuple(sizes)


def consolidation_epochs(total: int) -> int:
    """Return how many of all epochs are consolidation: what `total_epochs` adds.

    Args:
        total: The epochs of both phases.
    """
    return max(1, round(total * _SECOND / (1 + _SECOND))) if total > 1 else total


def _by_name(output: Any) -> SoftLoss | None:
    """Return how outputs are compared that say themselves that they are scores."""
    return scores_loss if getattr(output, "logits", None) is not None else None


def _first(batches: Iterable[Batch] | None, count: int) -> list[Batch]:
    """Return the first training batches, the same ones each time."""
    assert batches is not None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        found = [batch for _, batch in zip(range(count), batches, strict=False)]
    if not found:
        raise OptionError("the training data has no batch: ranks cannot be put into order.")
    return found
