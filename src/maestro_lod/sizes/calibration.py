"""What the layers of a model see: second moments of their inputs, in one streaming pass."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from maestro_lod.errors import DataError, LayerError, listed
from maestro_lod.files.stage_cache import Kept
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import unwrapped
from maestro_lod.layers.registry import low_rank_type
from maestro_lod.model.inputs import Loss, call, device_of, in_mode, on_device, split_batch
from maestro_lod.model.structure import Fill, uninitialized
from maestro_lod.model.structure import svd as by_weights
from maestro_lod.model.survey import Plan, Tied, Where
from maestro_lod.sizes.observer import LARGEST_OUTPUT, Moments, Observer
from maestro_lod.sizes.whitening import energies, whitened_factors

Batches: TypeAlias = Iterable[Any]
"""Batches as `fit` takes them, pairs (inputs, target), or inputs alone: a tensor, or a mapping of
keyword arguments."""


_KEPT_EVERY = 60.0  # seconds
_LEAST_WORK = 20  # times what it took to write the moments, before they are written again


class Calibration:
    """What the layers of a model see, by name; made by `calibrate`."""

    def __init__(self, layers: Mapping[str, LowRank], kept: Kept | None = None) -> None:
        self._layers, self._kept = dict(layers), kept or Kept()
        self.moments = {name: Moments() for name in layers}

    @property
    def unseen(self) -> list[str]:
        """What no sample reached, layers and experts of layers: split by their weights alone."""
        found = []
        for name, seen in self.moments.items():
            reached = [] if seen.reached is None else seen.reached.tolist()
            if not any(reached) and seen.outputs is None:
                found.append(name)
            elif not all(reached):
                found.append(f"{name} ({reached.count(False)} of {len(reached)})")
        return found

    @property
    def has_gradients(self) -> bool:
        """Whether a loss said how much errors count, of every layer: then they can be compared."""
        return all(seen.has_gradients for seen in self.moments.values())

    def fill(self) -> Fill:
        """Return what makes low-rank layers of dense ones by what was seen."""

        def filled(name: str, dense: nn.Module, rank: int) -> LowRank:
            seen, kind = self._of(name), low_rank_type(type(dense))
            if seen is None:
                return by_weights(name, dense, rank)
            assert kind is not None
            return kind.from_dense(
                dense,
                rank,
                split=lambda w, r: self._kept.part(
                    f"{name} at rank {r}", lambda: whitened_factors(w, r, seen.inputs, seen.outputs)
                ),
            )

        return filled

    def energies(self, name: str, dense: nn.Module) -> Tensor:
        """Return how much each rank of a layer contributes to its outputs, first to last.

        With gradients it is the square of what the loss would change by, to first order, summed
        over all positions, at which inputs and gradients are taken to be independent.
        """
        weight = dense.weight
        assert isinstance(weight, Tensor)
        seen, layer = self._of(name) or Moments(), self._layers[name]
        found = energies(layer.to_matrices(weight.detach()), seen.inputs, seen.outputs)
        return found / seen.count if seen.has_gradients else found

    def _of(self, name: str) -> Moments | None:
        if name not in self.moments:
            raise LayerError(
                f"calibration knows no layer {name or '(the model itself)'}: it is of another "
                "model, or was made with another only, skip or tied. Calibrate with the same."
            )
        seen = self.moments[name]
        return None if seen.inputs is None and seen.outputs is None else seen


def calibrate(
    model: nn.Module,
    batches: Batches,
    *,
    loss: Loss | None = None,
    only: Where | None = None,
    skip: Where | None = None,
    tied: Tied = "keep",
    memory: int = 2**31,
    kept: Kept | None = None,
) -> Calibration:
    """Run a dense model over batches and return what its layers see; changes nothing.

    With `loss(output, target)` the gradients of each layer's outputs are seen too: errors then
    count by what they do to the loss, and layers can be compared. Moments that take more than
    `memory` bytes are made part by part, each in a pass over the batches, and wait in temporary
    files. Layers that no batch reaches, and experts without tokens, are named in a warning and will
    be split by their weights alone; values that are not finite are refused. Moments and factors are
    `kept` if that is given.
    """
    model = unwrapped(model)
    plan = Plan(model, only=only, skip=skip, ranks=None, tied=tied)
    layers = {name: uninitialized(name, plan.dense[name], 0) for name in plan.wanted()}
    if not layers:
        raise LayerError(f"no layer of {type(model).__name__} can be calibrated.")
    data = list(batches) if isinstance(batches, Iterator) else batches
    found, kept = Calibration(layers, kept), kept or Kept()
    unfinished = _Unfinished(kept.file("calibrating"))
    moments = kept.part(
        "calibration", lambda: _seen(model, plan, layers, data, loss, memory, unfinished)
    )
    unfinished.remove()
    found.moments = {name: Moments(**of) for name, of in moments.items()}
    if found.unseen:
        warnings.warn(
            f"no calibration sample reached {listed(found.unseen)}: split by weights alone.",
            stacklevel=2,
        )
    return found


def _seen(
    model: nn.Module,
    plan: Plan,
    layers: Mapping[str, LowRank],
    batches: Batches,
    loss: Loss | None,
    memory: int,
    unfinished: _Unfinished,
) -> dict[str, dict[str, Any]]:
    """Return the moments of all layers, as plain values."""
    moments = {name: Moments() for name in (*layers, *plan.heads)}
    parts = list(_parts(layers, memory, gradients=loss is not None))
    done, first = unfinished.read(moments, parts, device_of(model))
    for number, part in enumerate(parts):
        if number >= done:
            observer = Observer(model, plan, part, moments, gradients=loss is not None)
            write = functools.partial(unfinished.write, moments, parts, number)
            _pass(observer, batches, loss, first if number == done else 0, write)
        for name in part if len(parts) > 1 else ():
            moments[name].to_disk()
    for head, embedding in plan.heads.items():
        moments[embedding].join_head(moments.pop(head))
    return {name: vars(of) for name, of in moments.items()}


def _parts(
    layers: Mapping[str, LowRank], memory: int, *, gradients: bool
) -> Iterator[dict[str, LowRank]]:
    """Split layers so that the moments of each part fit into memory, but for a single layer's."""
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
    """Run the model over the batches from the first on while a part of its layers is looked at.

    `after` gets the number of batches that were seen, after each of them.
    """
    model, device, number = observer.model, device_of(observer.model), -1
    with in_mode(model, training=False), observer.watching():
        for number, batch in enumerate(batches):
            if number < first:
                continue
            observer.batch = number
            inputs, target = split_batch(batch)
            with torch.set_grad_enabled(loss is not None):
                output = call(model, on_device(inputs, device))
                if loss is not None:
                    observer.differentiate(loss(output, on_device(target, device)))
            after(number + 1)
    if number < 0:
        raise DataError("there is nothing to calibrate on: the data has no batch.")


class _Unfinished:
    """The moments after a number of batches, in a file, so that the next call goes on from them."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._due = file, time.monotonic() + _KEPT_EVERY

    def write(
        self, moments: Mapping[str, Moments], parts: list[dict[str, LowRank]], done: int, seen: int
    ) -> None:
        """Write the moments after `done` parts and a number of batches, if it is time to."""
        if self._file is None or (began := time.monotonic()) < self._due:
            return
        values = {name: vars(of) for name, of in moments.items()}
        save_state([[[*part] for part in parts], done, seen, values], self._file)
        now = time.monotonic()
        self._due = now + max(_KEPT_EVERY, _LEAST_WORK * (now - began))

    def read(
        self, moments: Mapping[str, Moments], parts: list[dict[str, LowRank]], device: torch.device
    ) -> tuple[int, int]:
        """Read moments, if they are there; return how many parts and batches they are after."""
        if self._file is None or not self._file.exists():
            return 0, 0
        names, done, seen, values = load_state(self._file)
        if names != [[*part] for part in parts]:  # made within other limits of memory
            return 0, 0
        for name, of in values.items():
            vars(moments[name]).update(on_device(of, device))
        return done, seen

    def remove(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
