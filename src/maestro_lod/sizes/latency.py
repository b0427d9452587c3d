"""What a layer costs in time on this machine: dense beside factored, at a few ranks.

Fewer parameters are not always faster: two small products move more memory than one, and calls
have a price of their own. So each layer is measured in both plain forms, on inputs of the shapes
that it gets in a forward of the model, and `fuse` and `extract` can decide by that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import OptionError
from maestro_lod.layers.embedding import SharedHead
from maestro_lod.layers.lowrank import LowRank, PlainForm
from maestro_lod.layers.ranks import Ranks, require_low_rank, resolve_for, unwrapped
from maestro_lod.layers.uses import FactorUse, factor_uses
from maestro_lod.model.inputs import Call, Example, as_call, device_of, in_mode
from maestro_lod.model.surgery import extract
from maestro_lod.sizes.measured import Latency, LayerLatency, RankTiming
from maestro_lod.sizes.timing import batch_of, drawn, drawn_call, interleaved, ratios, run

_POINTS = 4  # ranks per layer: break-even or the stored rank, and halves of it
_WHOLE = "the dense model"  # keys of what is timed: this, and (layer, rank)
_DENSE = 0  # the rank in the key of a layer's dense form


def latency(model: nn.Module, example: Example, *, rounds: int = 9) -> Latency:
    """Measure every low-rank layer dense and factored on this machine; the model is untouched.

    The batch size is the example's, the number of threads is torch's. Of the example's floats only
    the shapes count (values are drawn); whole numbers, such as token ids, are used as they are.
    A layer that is used in several places counts with all of them. All forms are held in memory at
    once, about three times the dense model, so that each round meets all of them within moments.
    """
    if rounds < 1:
        raise OptionError(f"rounds={rounds!r} must be one or more.")
    layers = require_low_rank(model)
    device = device_of(model)
    call = drawn_call(as_call(example), device)
    with in_mode(model, training=False), torch.inference_mode():
        calls = _recorded_calls(model, call)
        dense = all_dense(model)
        variants: dict[Any, Callable[[], object]] = {_WHOLE: lambda: run(dense, call)}
        for name, layer in layers.items():
            if calls[name]:
                inputs = _drawn_inputs(calls[name], device)
                for rank in (_DENSE, *_grid(layer)):
                    variants[name, rank] = _forward(layer, rank, calls[name], inputs)
        times = interleaved(variants, rounds=rounds)
    whole = statistics.median(times[_WHOLE])
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return Latency(
        dense=whole,
        layers={name: _measured(name, layer, whole, times) for name, layer in layers.items()},
        batch=batch_of(call),
        rounds=rounds,
        threads=torch.get_num_threads(),
        dtype=str(floats[0]).removeprefix("torch."),
        device=str(device),
        torch=torch.__version__,
    )


def round_ranks(model: nn.Module, ranks: Ranks | None, *, multiple: int = 8) -> dict[str, int]:
    """Return ranks rounded to the nearest multiple that each layer has; kernels like those.

    A layer that has fewer ranks than the multiple keeps what was asked for, and so does rank 0.

    >>> small = lod.extract(model, round_ranks(model, 0.25))  # doctest: +SKIP
    """
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise OptionError(f"multiple={multiple!r} must be a whole number, one or more.")
    layers = require_low_rank(model)

    def rounded(rank: int, stored: int) -> int:
        if rank == 0 or stored < multiple:
            return rank
        nearest_multiple = math.floor(rank / multiple + 0.5) * multiple
        return min(max(nearest_multiple, multiple), stored // multiple * multiple)

    return {name: rounded(r, layers[name].rank) for name, r in resolve_for(model, ranks).items()}


def all_dense(model: nn.Module) -> nn.Module:
    """Return the model extracted with every layer multiplied out."""
    return extract(model, by=dict.fromkeys(require_low_rank(model), "dense"))


@dataclass(frozen=True)
class _LayerCall:
    """One call of a layer in the forward: by the layer itself, or by a head that shares it."""

    head: SharedHead | None
    inputs: tuple[Tensor, ...]
    """On the meta device where only their shapes and layouts matter."""


def _recorded_calls(model: nn.Module, call: Call) -> dict[str, list[_LayerCall]]:
    """Run the model once and note what each low-rank layer is called with.

    Parts that a layer multiplies by itself are not called: deployed, they cost what dense ones do.
    """
    calls: dict[str, list[_LayerCall]] = {name: [] for name in require_low_rank(model)}
    modules = dict(unwrapped(model).named_modules())

    def noting(use: FactorUse) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            layouts = (
                torch.empty_like(x, device="meta") if x.is_floating_point() else x.clone()
                for x in inputs
            )
            calls[use.owner].append(_LayerCall(use.head, tuple(layouts)))

        return note

    handles = [
        modules[use.name].register_forward_pre_hook(noting(use), with_kwargs=True)
        for use in factor_uses(unwrapped(model))
    ]
    try:
        run(model, call)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _break_even(layer: LowRank) -> int:
    return 0 if layer.dense_only else layer.break_even


def _grid(layer: LowRank) -> list[int]:
    """Return the ranks to measure: the largest that can pay, and halves of it."""
    top = min(max(layer.rank, 1), _break_even(layer))  # rank 0 becomes one rank of zeros
    return sorted({max(top >> i, 1) for i in range(_POINTS)}) if top else []


def _drawn_inputs(calls: list[_LayerCall], device: torch.device) -> list[tuple[Tensor, ...]]:
    """Return inputs for each call; floats of the same shape and layout share their memory."""
    generator = torch.Generator(device).manual_seed(0)
    memory: dict[Any, Tensor] = {}

    def filled(x: Tensor) -> Tensor:
        key = (x.shape, x.stride(), x.dtype) if x.is_meta else id(x)
        if key not in memory:
            memory[key] = drawn(x, device, generator)
        return memory[key]

    return [tuple(map(filled, call.inputs)) for call in calls]


def _forward(
    layer: LowRank, rank: int, calls: list[_LayerCall], inputs: list[tuple[Tensor, ...]]
) -> Callable[[], None]:
    """Return what runs a plain form of the layer as often as one forward of the model does."""
    form: PlainForm = "dense" if rank == _DENSE else "factored"
    plain = layer.plain(form, None if rank == _DENSE else min(rank, layer.rank))
    heads = {id(call.head): call.head.plain(plain) for call in calls if call.head is not None}
    steps = [heads.get(id(call.head), plain) for call in calls]

    def run_all() -> None:
        for step, given in zip(steps, inputs, strict=True):
            step(*given)

    return run_all


def _measured(
    name: str, layer: LowRank, whole: float, times: Mapping[Any, list[float]]
) -> LayerLatency:
    """Turn times into ratios within the same rounds, and these into medians."""
    dense, points = 0.0, []
    if (name, _DENSE) in times:
        dense_times = times[name, _DENSE]
        dense = whole * statistics.median(ratios(dense_times, times[_WHOLE]))
        for rank in _grid(layer):
            over_dense = ratios(times[name, rank], dense_times)
            points.append(RankTiming(rank, statistics.median(over_dense), _scatter(over_dense)))
    return LayerLatency(layer.rank, layer.full_rank, _break_even(layer), dense, tuple(points))


def _scatter(values: list[float]) -> float:
    """Say how far the median of these values may be off."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / math.sqrt(len(values))
