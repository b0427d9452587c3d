"""Surgery: decompose a dense model, fuse or extract a low-rank model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from maestro_lod.errors import LayerError, OptionError
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import (
    Model,
    Ranks,
    require_all_active,
    require_low_rank,
    resolve_for,
    unwrapped,
)
from maestro_lod.model.cost import By, better_forms
from maestro_lod.model.structure import (
    Fill,
    Form,
    Structure,
    drop_unneeded_unpacking,
    read_structure,
    restructure,
    restructured_copy,
    svd,
    uninitialized,
)
from maestro_lod.model.survey import Plan, Tied, Where
from maestro_lod.progress import ProgressLine


class Calibrated(Protocol):
    """A rule for splitting the layers of a model; `calibrate` returns one."""

    def fill(self) -> Fill:
        """Return a function that makes low-rank layers of dense ones."""


def decompose(
    model: Model,
    *,
    only: Where | None = None,
    skip: Where | None = None,
    ranks: Ranks | None = None,
    tied: Tied = "keep",
    calibration: Calibrated | None = None,
) -> Model:
    """Replace layers by low-rank ones, in place; outputs are unchanged.

    Linear, convolution, attention, recurrent and embedding layers are replaced, attention and
    recurrent ones weight by weight, and registered kinds (`register`). Layers that are low-rank
    already are kept. `survey` with the same arguments lists what is left dense, and why. Create
    the optimizer afterwards: the factors are new Parameters.

    Args:
        model: The model. A bare layer cannot change in place: use the return value.
        only: Which layers to replace: a glob pattern, several, or a predicate
            `(name, module) -> bool`. A pattern may name a module that contains layers.
        skip: Which layers to leave dense, in the same way.
        ranks: Ranks below the full one keep the leading directions. One value for all layers, or a
            mapping by name or pattern; an int is a rank, a float in (0, 1) a share of the full
            rank.
        tied: "share" gives an embedding and the output head that is tied to it one factor pair;
            "keep" leaves both dense, as any other tied layer.
        calibration: The result of `calibrate`. Ranks are then ordered by the recorded data
            instead of by the weights: each number of ranks is the best for that data. Use it for
            trained weights.

    Returns:
        The model; for a bare layer, its replacement.

    Raises:
        LayerError: If no layer can be replaced, a pattern matches none, or weights are not finite.
        RankError: If a layer cannot have the rank.
        OptionError: If an option is invalid.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> model = lod.decompose(model, skip="2")
    """
    if calibration is not None and not hasattr(calibration, "fill"):
        raise OptionError(
            f"calibration is a {type(calibration).__name__}. Give the result of "
            "lod.calibrate(model, batches)."
        )
    plan = Plan(model, only=only, skip=skip, ranks=ranks, tied=tied)
    target = _require_possible(model, plan)
    fill = svd if calibration is None else calibration.fill()
    changed = restructure(model, plan.structure(), fill=_with_progress(fill, len(target)))
    return model if changed is unwrapped(model) else cast("Model", changed)


def _require_possible(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the ranks of the layers to decompose; raise LayerError for a plan without effect."""
    target = plan.planned()
    if plan.without_effect:
        raise LayerError(
            f"{plan.without_effect} names only layers that are low-rank already, at another rank. "
            "Use at_ranks, set_ranks or extract to run them at smaller ranks."
        )
    if not target and not any(row.low_rank for row in plan.rows.values()):
        raise LayerError(_why_nothing(model, plan))
    require_usable_weights(plan)
    return target


def _with_progress(fill: Fill, count: int) -> Fill:
    """Return a fill that reports its progress."""
    progress, numbers = ProgressLine("decompose"), itertools.count(1)

    def fill_one(name: str, dense: nn.Module, rank: int) -> LowRank:
        number = next(numbers)
        progress(lambda: f"layer {number} of {count}, {name}")
        return fill(name, dense, rank)

    return fill_one


def _why_nothing(model: nn.Module, plan: Plan) -> str:
    rows = plan.rows.values()
    reasons = [f"{row.name or '(the model itself)'}: {row.left_alone}" for row in rows]
    return f"no layer of {type(model).__name__} can be decomposed. " + (
        f"The reasons: {'; '.join(reasons[:6])}." if reasons else "It has no weight matrix."
    )


def fuse(model: Model, *, by: By = "params") -> Model:
    """Make low-rank layers dense again where that is better, in place; outputs are unchanged.

    By parameters, a layer becomes dense iff m·n < r·(m+n); the others keep their ordered ranks.
    Both factors run at the same positions, so parameters and MACs agree, except for embeddings,
    which by "macs" become dense.
    Call it after training: an optimizer that holds the factors does not follow.

    Args:
        model: A decomposed model.
        by: "params" or "macs"; the result of `latency` decides by measured times; a mapping names
            the form of every low-rank layer; those that are not "dense" stay low-rank.

    Returns:
        The model; for a bare layer, its replacement.

    Raises:
        LayerError: If there is no low-rank layer, or one was compiled by itself.
        RankError: If a layer runs at fewer ranks than it stores.

    Example:
        >>> model = lod.fuse(lod.decompose(nn.Sequential(nn.Linear(64, 32))))
    """
    layers = require_low_rank(model)
    require_all_active(model, "fuse")
    _require_not_compiled_alone(model)
    target = read_structure(model)
    ranks = {name: layer.rank for name, layer in layers.items()}
    forms = better_forms(model, ranks, by, copied=False)
    for name, form in forms.items():
        if form == "dense":
            del target[name]
    heads = [name for name, form in target.items() if form.kind == "shared"]
    for name in heads:
        if target[name].embedding not in target:
            del target[name]
    fused = restructure(model, drop_unneeded_unpacking(target), fill=uninitialized)
    return model if fused is unwrapped(model) else cast("Model", fused)


def extract(model: Model, ranks: Ranks | None = None, *, by: By = "params") -> Model:
    """Return a deep copy made of plain `nn` layers at these ranks; the model is untouched.

    Each layer gets its smallest form: one dense layer, a `Sequential` of two (factored), or two
    and an index (pivoted), with which rank r of an m×n matrix takes r·(m+n-r) numbers. Hooks are
    left out, except those by which torch computes weights. The copy runs and pickles without this
    library, except for pivoted layers, and where attention, a recurrent layer or experts keep
    low-rank weights: these are then of `maestro_lod.layers.pivoted`, or
    `maestro_lod.layers.Attention`, `Recurrent` or `Experts`, in files that import torch alone. A
    recurrent layer multiplies its factors out once, when it first runs. A head that shares an
    embedding's factors shares the large one; the small one is stored twice, once transposed.

    Args:
        model: A decomposed model.
        ranks: Ranks as for `decompose`; a share is one of the full rank, whatever is stored. Layers
            that are not named keep their stored rank; rank 0 becomes one rank of zeros.
        by: The criterion for the form: "params" or "macs"; the result of `latency` decides by
            measured times; a mapping names "dense", "factored" or "pivoted" for every layer.

    Returns:
        The plain copy.

    Raises:
        LayerError: If there is no low-rank layer, or the model cannot be copied.
        RankError: If a layer cannot have the rank.

    Example:
        >>> small = lod.extract(lod.decompose(nn.Sequential(nn.Linear(64, 32))), 0.25)
    """
    inner = unwrapped(model)
    require_low_rank(inner)
    plain_model = restructured_copy(inner, deployed_structure(inner, resolve_for(inner, ranks), by))
    filled = [p for p in inner.parameters() if p.numel()]
    if filled and not any(p.requires_grad for p in filled):
        plain_model.requires_grad_(False)  # layers without ranks too, which cannot be asked
    return cast("Model", plain_model)


def deployed_structure(model: nn.Module, ranks: Mapping[str, int], by: By = "params") -> Structure:
    """Return the structure that `extract` gives a low-rank model at these ranks."""
    target = {n: form for n, form in read_structure(model).items() if form.kind == "unpacked"}
    for name, form in better_forms(model, ranks, by).items():
        target[name] = Form(form, ranks[name])
    return drop_unneeded_unpacking(target)


def _require_not_compiled_alone(model: nn.Module) -> None:
    for name, module in unwrapped(model).named_modules():
        inner = unwrapped(module)
        if inner is not module and hasattr(type(inner), "user_attributes"):
            raise LayerError(
                f"{name} was compiled separately, and its code would still use the factors. "
                "Compile the model or the module that contains it, or fuse before you compile."
            )


def require_usable_weights(plan: Plan) -> None:
    """Raise one LayerError for all layers whose weights cannot be factored."""
    problems = []
    for name in plan.planned():
        weight = plan.dense[name].weight
        assert isinstance(weight, Tensor)
        if weight.is_meta:
            problems.append(f"{name or '(the model itself)'} is on the meta device")
        elif not bool(torch.isfinite(weight.detach()).all()):
            problems.append(f"{name or '(the model itself)'} has NaN or infinite weights")
    if problems:
        raise LayerError(
            f"{'; '.join(problems[:6])}{f'; … ({len(problems)})' if len(problems) > 6 else ''}. "
            "Load or initialize the weights first, or leave these layers out with skip=[...]."
        )
