"""Dense model -> low-rank model -> plain model: decompose, fuse, extract."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from maestro_lod.errors import LayerError, OptionError
from maestro_lod.layers import (
    Attention,
    LowRank,
    LowRankEmbedding,
    Recurrent,
    SharedHead,
    low_rank_type,
)
from maestro_lod.layers.ranks import (
    Ranks,
    require_all_active,
    require_low_rank,
    resolve_for,
    unwrapped,
)
from maestro_lod.plan import STATE_HOOKS, Plan, Tied, Where, held_in

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)  # fmt: skip

Replacement: TypeAlias = LowRank | Attention | Recurrent | SharedHead
"""What stands in the place of a layer of torch, and keeps what a user put on it."""

Form: TypeAlias = Literal["dense", "factored"]


class Chooser(Protocol):
    """Anything that says which form of a layer is better at a rank; `latency` returns one."""

    def choose(self, name: str, rank: int) -> Form:
        """Return the better form of the layer of this name at this rank."""


By: TypeAlias = Literal["params", "macs"] | Chooser


def decompose(
    model: nn.Module,
    *,
    only: Where | None = None,
    skip: Where | None = None,
    ranks: Ranks | None = None,
    tied: Tied = "keep",
) -> nn.Module:
    """Replace layers by low-rank ones, in place; outputs are unchanged.

    Linear, convolution, attention, recurrent and embedding layers are replaced, attention and
    recurrent ones weight by weight. Returns the model (a bare layer cannot change in place: use
    what is returned). `only` and `skip` choose layers by glob pattern, which may also name a module
    that contains them, or by a predicate `(name, module) -> bool`. `ranks` below the full rank keep
    the leading singular directions: one value for all, or a mapping by name or pattern; an int is a
    rank, a float in (0, 1) a share of the full rank. `tied="share"` gives an embedding and the
    output head that is tied to it one factor pair; by default both are left alone, as is anything
    else that is tied. Layers that are low-rank already are kept. What is left alone, and why, is
    told by `survey` with the same arguments.

    Create the optimizer afterwards: the factors are new Parameters.

    >>> model = decompose(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    """
    plan = Plan(model, only=only, skip=skip, ranks=ranks, tied=tied)
    wanted = plan.wanted()
    if plan.without_effect:
        raise LayerError(
            f"{plan.without_effect} is for layers that are low-rank already, at another rank. Use "
            "at_ranks, set_ranks or extract to run them at smaller ones."
        )
    if not wanted and not any(row.low_rank for row in plan.rows.values()):
        rows = plan.rows.values()
        reasons = [f"{row.name or '(the model itself)'}: {row.left_alone}" for row in rows]
        raise LayerError(
            f"no layer of {type(model).__name__} can be decomposed. "
            + (f"Left alone: {'; '.join(reasons[:6])}." if reasons else "It has no weight matrix.")
        )
    dense = {name: plan.dense[name] for name in wanted}
    _require_usable_weights(dense)
    new: dict[int, nn.Module] = {}
    for name, rank in wanted.items():
        kind = low_rank_type(dense[name])
        assert kind is not None
        new[id(dense[name])] = kind.from_dense(dense[name], rank)
    # up to here nothing has been changed, and from here on nothing can fail
    _carry_out(unwrapped(model), plan, dense, new)
    changed = replace_modules(unwrapped(model), new)
    switch_off_fast_paths(changed)
    return model if changed is unwrapped(model) else changed


def _carry_out(
    model: nn.Module, plan: Plan, dense: Mapping[str, nn.Module], new: dict[int, nn.Module]
) -> None:
    """Give low-rank layers what their dense ones had, and add what they are part of to `new`."""
    modules = dict(model.named_modules())
    for name, module in dense.items():
        if name in modules:
            hand_over(module, new[id(module)])
    for name, opened in plan.opened.items():
        if any(id(part) in new for part in opened.children()):
            own_memory(opened, new)
            hand_over(modules[name], replace_modules(opened, new))
            new[id(modules[name])] = opened
    for head, embedding in plan.heads.items():
        factors, old = new[id(modules[embedding])], modules[head]
        assert isinstance(factors, LowRankEmbedding)
        new[id(old)] = SharedHead(factors, old._parameters.get("bias"))
        hand_over(old, new[id(old)])


def own_memory(opened: nn.Module, new: Mapping[int, nn.Module]) -> None:
    """Give the parts that stay dense memory of their own: they are views of a packed weight."""
    for part in opened.children():
        for key, parameter in part._parameters.items():
            if id(part) not in new and parameter is not None:
                part._parameters[key] = nn.Parameter(
                    parameter.detach().clone(), parameter.requires_grad
                )


def switch_off_fast_paths(model: nn.Module) -> None:
    """Keep torch's transformer layers from reading dense weights past low-rank layers."""
    for module in model.modules():
        replaced = any(isinstance(m, LowRank) for m in module.modules())
        if isinstance(module, nn.TransformerEncoderLayer) and replaced:
            module.activation_relu_or_gelu = 0  # only the fast path looks at it
        if isinstance(module, nn.TransformerEncoder) and replaced:
            module.enable_nested_tensor = module.use_nested_tensor = False


def fuse(model: nn.Module, *, by: By = "params") -> nn.Module:
    """Turn low-rank layers back to dense wherever that is better, in place; outputs are unchanged.

    A layer becomes dense iff m·n < r·(m+n). Both factors of a layer run at the same positions, so
    parameters and MACs agree on this, except for embeddings and recurrent layers, which are no
    cheaper to run factored: by "macs" they become dense. `by=lod.latency(model, example)` decides
    by what was measured on this machine instead. Meant for the end of training: an optimizer that
    holds the factors does not follow.
    """
    layers = require_low_rank(model)
    require_all_active(model, "fuse")
    for name, module in unwrapped(model).named_modules():
        if isinstance(unwrapped(module), Replacement) and unwrapped(module) is not module:
            raise LayerError(
                f"{name} was compiled by itself: its compiled code would go on with the factors. "
                "Compile the model or the part that holds it, or fuse before you compile."
            )
    new: dict[int, nn.Module] = {}
    for name in _better_dense(model, {name: layer.rank for name, layer in layers.items()}, by):
        layer = layers[name]
        new[id(layer)] = layer.dense()
        hand_over(layer, new[id(layer)])
    for module in model.modules():
        if isinstance(module, SharedHead) and id(module.embedding) in new:
            new[id(module)] = module.plain(new[id(module.embedding)])
            hand_over(module, new[id(module)])
        elif isinstance(module, Attention | Recurrent) and (closed := _closed(module, new)):
            new[id(module)] = closed
            hand_over(module, closed)
    fused = replace_modules(unwrapped(model), new)
    return model if fused is unwrapped(model) else fused


def _better_dense(model: nn.Module, ranks: Mapping[str, int], by: By) -> list[str]:
    """Return the names of the layers that are better dense at these ranks."""
    if by not in ("params", "macs") and not hasattr(by, "choose"):
        raise OptionError(
            f"by={by!r} is not known. Choose 'params' or 'macs', or give what was measured: "
            "by=lod.latency(model, example)."
        )
    shared = {id(m.embedding) for m in model.modules() if isinstance(m, SharedHead)}

    def better_dense(name: str, layer: LowRank) -> bool:
        rank = ranks[name]
        if not isinstance(by, str):
            return by.choose(name, rank) == "dense"
        if by == "macs" and id(layer) in shared:  # the head has to be paid for too
            return layer.dense_weights < layer.macs(1, rank) + layer.weights(rank)
        return layer.dense_is_cheaper(rank, by=by)

    return [name for name, layer in require_low_rank(model).items() if better_dense(name, layer)]


def _closed(module: Attention | Recurrent, new: Mapping[int, nn.Module]) -> nn.Module | None:
    """Return an opened layer as torch has it, if all its parts are dense after a replacement."""
    return module.closed({key: new.get(id(part), part) for key, part in module.named_children()})


def extract(model: nn.Module, ranks: Ranks | None = None, *, by: By = "params") -> nn.Module:
    """Return a deep copy made of plain `nn` layers at these ranks; the model is untouched.

    A layer becomes one dense layer where that is better (`by` as in `fuse`), else a `Sequential` of
    two; a recurrent layer is always torch's own, and so is attention where all its projections are
    dense. `ranks` as for `decompose`: a share is one of the full rank, whatever is stored. Layers
    that it does not name keep their stored rank; rank 0 becomes one rank of
    zeros, since no plain layer has none. Hooks are left out, except those by which torch computes
    weights (weight norm and the like). The copy runs and pickles without this library, except
    where attention keeps low-rank projections: it is then `maestro_lod.layers.Attention`, a class
    in a file of its own that needs torch alone. A head that shares an embedding's factors shares
    the large one; the small one is there twice, since plain layers want it transposed.
    """
    model = unwrapped(model)
    layers = require_low_rank(model)
    chosen = resolve_for(model, ranks)
    dense = set(_better_dense(model, chosen, by))
    memo: dict[int, Any] = {}
    replaced: list[Replacement] = list(layers.values())
    for name, rank in chosen.items():
        layer = layers[name]
        plain = memo[id(layer)] = plain_form(layer, rank, "dense" if name in dense else "factored")
        last = plain[-1] if isinstance(plain, nn.Sequential) else plain
        if layer.bias is not None:  # a bias that layers share stays shared
            last.bias = memo.setdefault(id(layer.bias), last.bias)
    for module in model.modules():
        if isinstance(module, SharedHead):
            if id(module.embedding) not in memo:
                raise LayerError(
                    "an output head here shares the factors of an embedding that is not part of "
                    f"this {type(model).__name__}. Extract the model that holds both."
                )
            plain = memo[id(module)] = module.plain(memo[id(module.embedding)])
            replaced.append(module)
            last = plain[-1] if isinstance(plain, nn.Sequential) else plain
            if module.bias is not None:
                last.bias = memo.setdefault(id(module.bias), last.bias)
        elif isinstance(module, Attention | Recurrent) and (closed := _closed(module, memo)):
            memo[id(module)] = closed
            replaced.append(module)
    plain_model = copy_without_hooks(model, memo, replaced)
    filled = [p for p in model.parameters() if p.numel()]
    if filled and not any(p.requires_grad for p in filled):
        plain_model.requires_grad_(False)  # layers without ranks too, which cannot be asked
    return plain_model


def plain_form(layer: LowRank, rank: int | None, form: Form) -> nn.Module:
    """Return plain layers that compute what this one does at the rank, in a form it can have."""
    factored = form == "factored" and layer.has_factored_form
    plain = layer.factored(rank) if factored else layer.plain_dense(rank)
    for key in layer.options if factored else ():
        setattr(plain, key, copy.deepcopy(getattr(layer, key)))  # code of a model may read them
    return plain


def copy_without_hooks(
    model: nn.Module, memo: dict[int, Any], replaced: Iterable[Replacement] = ()
) -> nn.Module:
    """Deep-copy a model, taking what `memo` holds (by id) instead of copying it; hooks stay out.

    What `memo` holds for layers in `replaced` gets copies of what a user put on them.
    """
    for module in model.modules():
        for attribute in _HOOKS + STATE_HOOKS:
            hooks: dict[int, Any] = getattr(module, attribute)
            memo[id(hooks)] = OrderedDict((k, h) for k, h in hooks.items() if _makes_weights(h))
        for value in _loose_tensors(module):  # activations, a weight that such a hook computed
            if not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    try:
        copied = copy.deepcopy(model, memo)
        for layer in replaced:
            for key in layer.handed_over:
                _put(memo[id(layer)], key, copy.deepcopy(getattr(layer, key), memo), layer)
    except TypeError as error:
        raise LayerError(
            f"{type(model).__name__} cannot be copied ({error}). Take what cannot be out of its "
            "attributes, or tell Python how to copy it (__deepcopy__)."
        ) from error
    for module in copied.modules():  # transformers notes that its hooks are there; now they are not
        vars(module).pop("_output_capturing_hooks_installed", None)
    return copied


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device: its structure and shapes, no memory."""
    memo: dict[int, Any] = {}
    loose = (tensor for module in model.modules() for tensor in _loose_tensors(module))
    for tensor in (*model.parameters(), *model.buffers(), *loose):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy_without_hooks(model, memo)


def _loose_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Find the tensors that a module holds in its attributes or in containers there."""
    for value in vars(module).values():
        yield from (held for held in held_in(value) if isinstance(held, Tensor))


def replace_modules(model: nn.Module, new: Mapping[int, nn.Module]) -> nn.Module:
    """Put new modules in the place of old ones, given by id; every reference is replaced."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in new:
                parent._modules[key] = new[id(child)]
    return new.get(id(model), model)


def hand_over(old: nn.Module, new: nn.Module) -> None:
    """Give a layer's hooks, bias Parameter (it may be shared) and what a user added to another."""
    hand_over_hooks(old, new)
    if "bias" in old._parameters:
        new.bias = old.bias
    if isinstance(new, Replacement):
        closed = isinstance(new, Attention | Recurrent)  # torch's own also has private attributes
        new.handed_over = tuple(
            key
            for key in (*vars(old), *old._buffers)
            if not hasattr(new, key) and not (closed and key.startswith("_"))
        )
    hand_over_added(old, new)


def hand_over_added(old: nn.Module, new: nn.Module) -> None:
    """Give what a user put on a layer to another; one of the two keeps a list of it."""
    keeper = new if isinstance(new, Replacement) else old
    for key in keeper.handed_over if isinstance(keeper, Replacement) else ():
        _put(new, key, getattr(old, key), old)


def hand_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give the forward and backward hooks of a module to its replacement."""
    for attribute in _HOOKS + _HOOK_FLAGS:
        setattr(new, attribute, getattr(old, attribute))


def _put(new: nn.Module, key: str, value: Any, old: nn.Module) -> None:
    """Set an attribute of a module, or a buffer where it was one."""
    if key in old._buffers:
        new.register_buffer(key, value, persistent=key not in old._non_persistent_buffers_set)
    else:
        setattr(new, key, value)


def _makes_weights(hook: Any) -> bool:
    """Tell hooks by which torch itself makes weights from hooks that a user added."""
    hook = getattr(hook, "hook", hook)  # torch wraps those that run before loading
    lazy = getattr(hook, "__name__", "") in ("_infer_parameters", "_lazy_load_hook")
    return lazy or type(hook).__module__.startswith("torch.nn.utils")


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
