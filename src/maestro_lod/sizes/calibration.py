"""Calibration: second moments of the inputs of a model's layers, in one pass over some batches."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from maestro_lod.errors import DataError, LayerError, listed
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import unwrapped
from maestro_lod.layers.registry import low_rank_type
from maestro_lod.model.inputs import (
    Loss,
    ModelInputs,
    in_mode,
    model_device,
    on_device,
    split_batch,
)
from maestro_lod.model.structure import Fill, uninitialized
from maestro_lod.model.structure import svd as by_weights
from maestro_lod.model.survey import Plan, Tied, Where
from maestro_lod.sizes.observer import LARGEST_OUTPUT, Moments, Observer
from maestro_lod.sizes.whitening import energies, whitened_factors

Batches: TypeAlias = Iterable[Any]
"""Batches as `fit` takes them, pairs (inputs, target), or inputs alone: a tensor, or a mapping of
keyword arguments."""


_SAVED_EVERY = 60.0  # seconds
_LEAST_WORK = 20  # the least time between two writes of moments, in durations of a write
_PARTIAL = "calibrating"  # the name of unfinished moments in the cache


class Calibration:
    """Moments of the inputs of a model's layers, by name; the result of `calibrate`."""

    def __init__(self, layers: Mapping[str, LowRank], cache: StageCache | None = None) -> None:
        self._layers, self._cache = dict(layers), cache or StageCache()
        self.moments = {name: Moments() for name in layers}

    @property
    def unseen(self) -> list[str]:
        """Layers and experts that no sample reached; they are decomposed by their weights alone."""
        names = []
        for name, seen in self.moments.items():
            reached = [] if seen.reached is None else seen.reached.tolist()
            if not any(reached) and seen.outputs is None:
                names.append(name)
            elif not all(reached):
                names.append(f"{name} ({reached.count(False)} of {len(reached)})")
        return names

    @property
    def has_gradients(self) -> bool:
        """Whether every layer has gradients of a loss, so that layers can be compared."""
        return all(seen.has_gradients for seen in self.moments.values())

    def fill(self) -> Fill:
        """Return a function that decomposes dense layers by their moments."""

        def fill_one(name: str, dense: nn.Module, rank: int) -> LowRank:
            moments, kind = self._recorded(name), low_rank_type(type(dense))
            if moments is None:
                return by_weights(name, dense, rank)
            assert kind is not None
            return kind.from_dense(
                dense,
                rank,
                split=lambda w, r: self._cache.get_or_compute(
                    f"{name} at rank {r}",
                    lambda: whitened_factors(w, r, moments.inputs, moments.outputs),
                ),
            )

        return fill_one

    def energies(self, name: str, dense: nn.Module) -> Tensor:
        """Return the contribution of each rank of a layer to its outputs, first to last.

        With gradients it is the square of the first-order change of the loss, summed over all
        positions, with inputs and gradients assumed to be independent.
        """
        weight = dense.weight
        assert isinstance(weight, Tensor)
        moments, layer = self._recorded(name) or Moments(), self._layers[name]
        sums = energies(layer.to_matrices(weight.detach()), moments.inputs, moments.outputs)
        return sums / moments.count if moments.has_gradients else sums

    def _recorded(self, name: str) -> Moments | None:
        if name not in self.moments:
            raise LayerError(
                f"calibration has no layer {name or '(the model itself)'}: it is of another model, "
                "or was made with another only, skip or tied. Calibrate with the same ones."
            )
        moments = self.moments[name]
        return None if moments.inputs is None and moments.outputs is None else moments


def calibrate(
    model: nn.Module,
    batches: Batches,
    *,
    loss: Loss | None = None,
    only: Where | None = None,
    skip: Where | None = None,
    tied: Tied = "keep",
    memory: int = 2**31,
    resume: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Run a dense model over batches and collect moments of its layers; changes nothing.

    A warning names layers that no batch reaches, and experts without tokens; they are decomposed by
    their weights alone.

    Args:
        model: A dense model.
        batches: Batches (inputs, target), or inputs alone.
        loss: `loss(output, target)`. With it gradients of the layers' outputs are collected too:
            errors then count by their effect on the loss, and layers can be compared.
        only: The layers to calibrate, as for `decompose`.
        skip: The layers to leave out, as for `decompose`.
        tied: The treatment of layers that share a weight, as for `decompose`.
        memory: The most bytes of moments in memory. If all need more, they are collected in several
            passes over the batches, and stored in temporary files.
        resume: A directory for finished work, from which the same call resumes after a kill. The
            batches must come in the same order each time.

    Returns:
        The calibration, for `decompose` and `choose_ranks`.

    Raises:
        LayerError: If no layer can be calibrated.
        DataError: If there is no batch, or one gives values that are not finite.
        OptionError: If the directory `resume` belongs to another call.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> calibration = lod.calibrate(model, [torch.randn(100, 64)])
        >>> model = lod.decompose(model, calibration=calibration)
    """
    model = unwrapped(model)
    plan = Plan(model, only=only, skip=skip, ranks=None, tied=tied)
    data = list(batches) if isinstance(batches, Iterator) else batches
    call = {"model": model, "layers": [*plan.planned()], "tied": tied, "loss": loss}
    call |= {"data": [*data] if resume is not None else None}
    return calibrate_plan(
        model, plan, data, loss=loss, memory=memory, cache=StageCache(resume, call), stacklevel=3
    )


def calibrate_plan(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    loss: Loss | None,
    cache: StageCache,
    memory: int = 2**31,
    stacklevel: int = 2,
) -> Calibration:
    """Calibrate the layers that a plan decomposes, with a cache for the moments."""
    layers = {name: uninitialized(name, plan.dense[name], 0) for name in plan.planned()}
    if not layers:
        raise LayerError(
            f"no layer of {type(model).__name__} can be calibrated. Call survey for the reasons."
        )
    calibration = Calibration(layers, cache)
    moments = cache.get_or_compute(
        "calibration", lambda: _moments(model, plan, layers, batches, loss, memory, cache)
    )
    cache.remove(_PARTIAL)
    calibration.moments = {name: Moments(**values) for name, values in moments.items()}
    if calibration.unseen:
        warnings.warn(
            f"no calibration sample reached {listed(calibration.unseen)}: decomposed by weights "
            "alone. Add samples that reach them.",
            stacklevel=stacklevel,
        )
    return calibration


def _moments(
    model: nn.Module,
    plan: Plan,
    layers: Mapping[str, LowRank],
    batches: Iterable[Any],
    loss: Loss | None,
    memory: int,
    cache: StageCache,
) -> dict[str, dict[str, Any]]:
    """Return the moments of all layers, as plain values."""
    moments = {name: Moments() for name in (*layers, *plan.heads)}
    parts = list(_parts(layers, memory, gradients=loss is not None))
    partial = _Partial(cache)
    done, first = partial.load(moments, parts, model_device(model))
    for number, part in enumerate(parts):
        if number >= done:
            observer = Observer(model, plan, part, moments, gradients=loss is not None)
            save = functools.partial(partial.save, moments, parts, number)
            _pass(observer, batches, loss, first if number == done else 0, save)
        for name in part if len(parts) > 1 else ():
            moments[name].to_disk()
    for head, embedding in plan.heads.items():
        moments[embedding].join_head(moments.pop(head))
    return {name: vars(values) for name, values in moments.items()}


def _parts(
    layers: Mapping[str, LowRank], memory: int, *, gradients: bool
) -> Iterator[dict[str, LowRank]]:
    """Split layers into parts whose moments fit into memory; a part has at least one layer."""
    part: dict[str, LowRank] = {}
    used = 0
    for name, layer in layers.items():
        m, n = layer.matrix_shape
        size = 8 * layer.groups * (n * n + (m * m if gradients and m <= LARGEST_OUTPUT else 0))
        if part and used + size > memory:
            yield part
            part, used = {}, 0
        part[name] = layer
        used += size
    yield part


def _pass(
    observer: Observer,
    batches: Batches,
    loss: Loss | None,
    first: int,
    after: Callable[[int], None],
) -> None:
    """Run the model over the batches from number `first` on, while its layers are observed.

    `after` is called after each batch with the number of batches so far.
    """
    model, device, number = observer.model, model_device(observer.model), -1
    with in_mode(model, training=False), observer.watching():
        for number, batch in enumerate(batches):
            if number < first:
                continue
            observer.batch = number
            inputs, target = split_batch(batch)
            with torch.set_grad_enabled(loss is not None):
                output = ModelInputs.wrap(inputs).to(device).call(model)
                if loss is not None:
                    observer.differentiate(loss(output, on_device(target, device)))
            after(number + 1)
    if number < 0:
        raise DataError("the calibration data has no batches. Give at least one.")


class _Partial:
    """The moments after a number of batches, so that a killed calibration resumes from them."""

    def __init__(self, cache: StageCache) -> None:
        self._cache, self._due = cache, time.monotonic() + _SAVED_EVERY

    def save(
        self,
        moments: Mapping[str, Moments],
        parts: list[dict[str, LowRank]],
        done: int,
        batches: int,
    ) -> None:
        """Save the moments after `done` parts and a number of batches, if a save is due."""
        if (began := time.monotonic()) < self._due:
            return
        values = {name: vars(one) for name, one in moments.items()}
        self._cache.save(_PARTIAL, [[[*part] for part in parts], done, batches, values])
        now = time.monotonic()
        self._due = now + max(_SAVED_EVERY, _LEAST_WORK * (now - began))

    def load(
        self, moments: Mapping[str, Moments], parts: list[dict[str, LowRank]], device: torch.device
    ) -> tuple[int, int]:
        """Load saved moments; return the numbers of finished parts and batches, else zeros."""
        if (saved := self._cache.load(_PARTIAL)) is None:
            return 0, 0
        names, done, batches, values = saved
        if names != [[*part] for part in parts]:  # saved with another limit of memory
            return 0, 0
        for name, one in values.items():
            vars(moments[name]).update(on_device(one, device))
        return done, batches
