"""Dense model -> low-rank model -> plain model: survey, decompose, fuse, extract."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from maestro_lod.errors import LayerError, OptionError, listed, nearest
from maestro_lod.layers import LOW_RANK_TYPE, LowRank
from maestro_lod.layers.ranks import Ranks, matches, require_low_rank, resolve, resolve_for
from maestro_lod.table import table

Where = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Which layers: a glob pattern, several, or a predicate (name, module) -> bool."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)  # fmt: skip


@dataclass(frozen=True)
class SurveyedLayer:
    """One layer that holds a weight matrix: what it is, and why it is left alone if it is."""

    name: str
    kind: str
    shape: tuple[int, ...]
    full_rank: int | None = None
    """None for kinds that cannot be decomposed."""
    rank: int | None = None
    """The rank that the layer has, or would get; None where it is left alone."""
    low_rank: bool = False
    """Whether the layer is low-rank now."""
    left_alone: str = ""
    """Why the layer stays dense; empty where it is, or can be, low-rank."""


@dataclass(frozen=True)
class Survey:
    """What `decompose` makes of each layer of a model, and why: data, and a table when printed."""

    layers: tuple[SurveyedLayer, ...]

    @property
    def left_alone(self) -> dict[str, str]:
        """The layers that stay dense, each with the reason."""
        return {row.name: row.left_alone for row in self.layers if row.left_alone}

    @property
    def ranks(self) -> dict[str, int]:
        """The layers that are low-rank, or would be, each with its rank."""
        return {row.name: row.rank for row in self.layers if row.rank is not None}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            (
                row.name or "(the model itself)",
                row.kind,
                "×".join(map(str, row.shape)),
                "" if row.rank is None else f"{row.rank}/{row.full_rank}",
                row.left_alone or ("low-rank" if row.low_rank else "can be decomposed"),
            )
            for row in self.layers
        ]
        return table(("layer", "kind", "weight", "rank", ""), rows, right=(3,))


def survey(
    model: nn.Module,
    *,
    only: Where | None = None,
    skip: Where | None = None,
    ranks: Ranks | None = None,
) -> Survey:
    """Say what `decompose` with these arguments makes of each layer, and why; changes nothing.

    Every module that owns a weight matrix is listed. On a model that is decomposed already, it
    shows what was done: the low-rank layers with their ranks, the others with their reasons.
    """
    obstacles = _Obstacles(model)
    rows: dict[str, SurveyedLayer] = {}
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            shape, full, rank = tuple(module.weight_shape), module.full_rank, module.rank
            rows[name] = SurveyedLayer(name, module.kind, shape, full, rank, low_rank=True)
            continue
        reason = obstacles.to(module)
        if reason is not None:
            kind, shape = type(module).__name__, _largest_shape(module)
            rows[name] = SurveyedLayer(name, kind, shape, left_alone=reason)
            if not reason:
                full = LOW_RANK_TYPE[type(module)].like(module, 0).full_rank
                rows[name] = SurveyedLayer(name, kind, shape, full, rank=full)
    _apply_choice(rows, model, only=only, skip=skip)
    if ranks is not None:
        _apply_ranks(rows, ranks)
    return Survey(tuple(rows.values()))


def decompose(
    model: nn.Module,
    *,
    only: Where | None = None,
    skip: Where | None = None,
    ranks: Ranks | None = None,
) -> nn.Module:
    """Replace linear and convolution layers by low-rank ones, in place; outputs are unchanged.

    Returns the model (a bare layer cannot change in place: use what is returned). `only` and
    `skip` choose layers by glob pattern, which may also name a module that contains them, or by a
    predicate `(name, module) -> bool`. `ranks` below the full rank keep the leading singular
    directions: one value for all, or a mapping by name or pattern; an int is a rank, a float in
    (0, 1) a share of the full rank. Layers that are low-rank already are kept. What is left alone,
    and why, is told by `survey` with the same arguments.

    Create the optimizer afterwards: the factors are new Parameters.

    >>> model = decompose(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    """
    plan = survey(model, only=only, skip=skip, ranks=ranks)
    wanted = [row for row in plan.layers if row.rank is not None and not row.low_rank]
    if not wanted and not any(row.low_rank for row in plan.layers):
        reasons = [f"{row.name or '(the model itself)'}: {row.left_alone}" for row in plan.layers]
        raise LayerError(
            f"no layer of {type(model).__name__} can be decomposed. "
            + (f"Left alone: {'; '.join(reasons[:6])}." if reasons else "It has no weight matrix.")
        )
    dense = {row.name: model.get_submodule(row.name) for row in wanted}
    _require_usable_weights(dense)
    new: dict[int, nn.Module] = {}
    for row in wanted:
        module = dense[row.name]
        new[id(module)] = LOW_RANK_TYPE[type(module)].from_dense(module, row.rank)
    for module in dense.values():
        hand_over(module, new[id(module)])
        for key, value in vars(module).items():
            if not hasattr(new[id(module)], key):  # attributes that a user put on the layer
                setattr(new[id(module)], key, value)
    return replace_modules(model, new)


def fuse(model: nn.Module, *, by: Literal["params", "macs"] = "params") -> nn.Module:
    """Turn low-rank layers back to dense wherever that is cheaper, in place; outputs are unchanged.

    A layer becomes dense iff m·n < r·(m+n). Both factors of a layer run at the same positions, so
    parameters and MACs agree on this. Meant for the end of training: an optimizer that holds the
    factors does not follow.
    """
    if by not in ("params", "macs"):
        raise OptionError(f"by={by!r} is not known. Choose 'params' or 'macs'.")
    new: dict[int, nn.Module] = {}
    for layer in require_low_rank(model).values():
        if layer.dense_is_cheaper():
            new[id(layer)] = layer.dense()
            hand_over(layer, new[id(layer)])
    return replace_modules(model, new)


def extract(model: nn.Module, ranks: Ranks | None = None) -> nn.Module:
    """Return a deep copy made of plain `nn` layers at these ranks; the model is untouched.

    A layer becomes one dense layer where that is cheaper (see `fuse`), else a `Sequential` of two.
    Layers that `ranks` does not name keep their stored rank; rank 0 becomes one rank of zeros,
    since no plain layer has none. Hooks are left out, except those by which torch computes weights
    (weight norm and the like). The copy runs and pickles without this library.
    """
    layers = require_low_rank(model)
    memo: dict[int, Any] = {}
    for name, rank in resolve_for(model, ranks).items():
        layer = layers[name]
        plain = memo[id(layer)] = layer.plain(rank)
        last = plain[-1] if isinstance(plain, nn.Sequential) else plain
        if layer.bias is not None:  # a bias that layers share stays shared
            last.bias = memo.setdefault(id(layer.bias), last.bias)
    return copy_without_hooks(model, memo)


def copy_without_hooks(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a model, taking what `memo` holds (by id) instead of copying it; hooks stay out."""
    for module in model.modules():
        for attribute in _HOOKS:
            hooks: dict[int, Any] = getattr(module, attribute)
            memo[id(hooks)] = OrderedDict((k, h) for k, h in hooks.items() if _computes_weights(h))
    return copy.deepcopy(model, memo)


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device: its structure and shapes, no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy_without_hooks(model, memo)


def replace_modules(model: nn.Module, new: Mapping[int, nn.Module]) -> nn.Module:
    """Put new modules in the place of old ones, given by id; every reference is replaced."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in new:
                parent._modules[key] = new[id(child)]
    return new.get(id(model), model)


def hand_over(old: nn.Module, new: nn.Module) -> None:
    """Give the hooks and the bias Parameter (which may be shared) of a layer to its replacement."""
    for attribute in _HOOKS + _HOOK_FLAGS:
        setattr(new, attribute, getattr(old, attribute))
    new.bias = old.bias


def _computes_weights(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils")


def _largest_shape(module: nn.Module) -> tuple[int, ...]:
    own = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    return tuple(max(own, key=lambda p: p.numel()).shape) if own else ()


def _apply_choice(
    rows: dict[str, SurveyedLayer], model: nn.Module, *, only: Where | None, skip: Where | None
) -> None:
    """Mark the rows that `only` and `skip` rule out; refuse a pattern that matches nothing."""
    for option, where, keep in (("only", only, True), ("skip", skip, False)):
        if where is None:
            continue
        if callable(where):
            found = {name: "" for name in rows if where(name, model.get_submodule(name))}
        else:
            patterns = [where] if isinstance(where, str) else list(where)
            found = {}
            for pattern in patterns:
                hits = [name for name in rows if matches(name, pattern)]
                if not hits:
                    usable = [row.name for row in rows.values() if row.rank is not None]
                    raise LayerError(
                        f"{option} pattern {pattern!r} matches no layer.{nearest(pattern, rows)} "
                        f"Layers that can be decomposed: {listed(usable)}."
                    )
                found |= dict.fromkeys(hits, f" ({pattern})")
        for name, row in rows.items():
            if row.rank is not None and not row.low_rank and (name in found) is not keep:
                reason = "not among only" if keep else f"skipped as asked{found[name]}"
                rows[name] = SurveyedLayer(
                    name, row.kind, row.shape, row.full_rank, left_alone=reason
                )


def _apply_ranks(rows: dict[str, SurveyedLayer], ranks: Ranks) -> None:
    """Set the ranks of the rows that are to be decomposed; refuse ranks for any other row."""
    if isinstance(ranks, Mapping):
        for key in ranks:
            row = rows.get(key)
            if row is not None and row.left_alone:
                raise LayerError(f"ranks names {key!r}, which is left alone: {row.left_alone}.")
            if row is not None and row.low_rank:
                raise LayerError(
                    f"ranks names {key!r}, which is low-rank already (rank {row.rank}). "
                    "Use at_ranks or extract to run it at a smaller rank."
                )
    limits = {
        row.name: (row.full_rank, row.full_rank)
        for row in rows.values()
        if row.rank is not None and row.full_rank is not None and not row.low_rank
    }
    for name, rank in resolve(ranks, limits).items() if limits else ():
        row = rows[name]
        rows[name] = SurveyedLayer(name, row.kind, row.shape, row.full_rank, rank)


def _require_usable_weights(dense: Mapping[str, nn.Module]) -> None:
    """Collect every layer whose weight cannot be factored, then refuse them together."""
    problems = []
    for name, module in dense.items():
        weight = module.weight
        assert isinstance(weight, Tensor)
        if weight.is_meta:
            problems.append(f"{name or '(the model itself)'} is on the meta device")
        elif not bool(torch.isfinite(weight).all()):
            problems.append(f"{name or '(the model itself)'} has NaN or infinite weights")
    if problems:
        raise LayerError(
            f"{'; '.join(problems[:6])}{f'; … ({len(problems)})' if len(problems) > 6 else ''}. "
            "Load or initialize the weights first, or leave these layers out with skip=[...]."
        )


class _Obstacles:
    """What stands in the way of decomposing the modules of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._sharers: dict[int, list[str]] = defaultdict(list)  # memory -> parameter names
        self._holders: dict[int, str] = {}  # module -> the plain container that also holds it
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not is_lazy(parameter) and parameter.numel():
                    memory = id(parameter) if parameter.is_meta else parameter.data_ptr()
                    self._sharers[memory].append(f"{name}.{key}".lstrip("."))
            for key, value in vars(module).items():
                held = value.values() if isinstance(value, dict) else value
                if key != "_modules" and isinstance(held, list | tuple | type({}.values())):
                    where = f"{name}.{key}".lstrip(".")
                    self._holders |= {id(m): where for m in held if isinstance(m, nn.Module)}

    def to(self, module: nn.Module) -> str | None:
        """Return why a module cannot be decomposed, '' if it can, None if there is nothing to."""
        own = [p for p in module._parameters.values() if p is not None]
        if type(module) in LOW_RANK_TYPE:
            return self._to_dense(module)
        if ".quantized." in type(module).__module__ and not isinstance(module, nn.Sequential):
            return "quantized"
        if parametrize.is_parametrized(module):
            return "parametrized"
        if any(is_lazy(p) for p in own):
            return "lazy: its shape is not known before the first forward"
        if all(p.ndim < 2 for p in own):
            return None
        for supported in LOW_RANK_TYPE:
            if isinstance(module, supported):
                return f"a subclass of {supported.__name__}, whose forward may differ"
        return f"{type(module).__name__} is not a supported kind"

    def _to_dense(self, module: nn.Module) -> str:
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed by a hook (weight norm, spectral norm, pruning)"
        if type(weight) is not nn.Parameter or not weight.dtype.is_floating_point:
            return f"its weight is a {type(weight).__name__} of {weight.dtype}"
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        if extra := module._parameters.keys() - {"weight", "bias"}:
            return f"it has further parameters ({', '.join(sorted(extra))})"
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return "its weight carries tensor hooks, which its factors could not honour"
        sharers = [] if not weight.numel() else self._sharers[
            id(weight) if weight.is_meta else weight.data_ptr()
        ]  # fmt: skip
        if len(sharers) > 1:
            return f"its weight is tied ({' = '.join(sharers)})"
        if id(module) in self._holders:
            return f"it is also held by the plain container {self._holders[id(module)]}"
        probe = LOW_RANK_TYPE[type(module)].like(module, 0)
        if probe.weights(1) >= probe.dense_weights:
            m, n = probe.matrix_shape
            per_group = " per group" if probe.groups > 1 else ""
            return f"no rank saves anything ({m}×{n}{per_group})"
        return ""
