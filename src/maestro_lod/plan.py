"""What can be decomposed, and why the rest is left alone."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from maestro_lod.errors import LayerError, OptionError, listed, nearest
from maestro_lod.layers import (
    OPENED_TYPE,
    Attention,
    LowRank,
    Recurrent,
    SharedHead,
    low_rank_type,
    low_rank_type_of,
)
from maestro_lod.layers.ranks import Ranks, matches, resolve, unwrapped
from maestro_lod.table import table

Where = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Which layers: a glob pattern, several, or a predicate (name, module) -> bool."""

Tied = Literal["keep", "share"]
"""What happens to an embedding that is tied to an output head: left alone, or one factor pair."""


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
    tied: Tied = "keep",
) -> Survey:
    """Say what `decompose` with these arguments makes of each layer, and why; changes nothing.

    Every module that owns a weight matrix is listed; attention and recurrent layers by their parts.
    On a model that is decomposed already, it shows what was done: the low-rank layers with their
    ranks, the others with their reasons.
    """
    return Survey(tuple(Plan(model, only=only, skip=skip, ranks=ranks, tied=tied).rows.values()))


class Plan:
    """A survey together with the modules that it speaks of."""

    rows: dict[str, SurveyedLayer]
    dense: dict[str, nn.Module]
    """The dense layer behind each row that can be decomposed."""
    opened: dict[str, Attention | Recurrent]
    """What the layers with several weights would be replaced by, on views of their weights."""
    heads: dict[str, str]
    """Output heads that would share the factors of an embedding: name of one -> of the other."""
    without_effect: str = ""
    """What was given of ranks that would change nothing."""

    def __init__(
        self,
        model: nn.Module,
        *,
        only: Where | None,
        skip: Where | None,
        ranks: Ranks | None,
        tied: Tied,
    ) -> None:
        if tied not in ("keep", "share"):
            raise OptionError(f"tied={tied!r} is not known. Choose 'keep' or 'share'.")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise LayerError(
                "the model is inside DistributedDataParallel, which would go on with the old "
                "parameters. Decompose the model first, then wrap it."
            )
        model = unwrapped(model)
        self.rows, self.dense, self.opened, self.heads = {}, {}, {}, {}
        self._linear: dict[str, nn.Module] = {}  # the heads themselves
        self._obstacles = _Obstacles(model)
        done: set[int] = set()  # inside layers that were dealt with as a whole
        for name, module in model.named_modules():
            if id(module) not in done and self._examine(name, module):
                done |= {id(inner) for inner in module.modules()}
        if tied == "share":
            self._share_tied()
        self._apply_choice(only, keep=True)
        self._apply_choice(skip, keep=False)
        if ranks is not None:
            self._apply_ranks(ranks)

    def wanted(self) -> dict[str, int]:
        """Return the layers to be decomposed now, with their ranks."""
        return {
            name: row.rank
            for name, row in self.rows.items()
            if row.rank is not None and not row.low_rank
        }

    def _examine(self, name: str, module: nn.Module) -> bool:
        """List one module; say whether that deals with its submodules too."""
        if isinstance(module, LowRank):
            shape, full = tuple(module.weight_shape), module.full_rank
            self.rows[name] = SurveyedLayer(name, module.kind, shape, full, module.rank, True)
        elif isinstance(module, SharedHead):
            shape = tuple(module.embedding.weight_shape)
            reason = "uses the factors of its embedding"
            self.rows[name] = SurveyedLayer(name, "SharedHead", shape, left_alone=reason)
        elif type(module) in OPENED_TYPE:
            if reason := self._obstacles.to_opening(module):
                self._leave_alone(name, module, reason)
            else:
                self.opened[name] = OPENED_TYPE[type(module)](module)  # type: ignore[arg-type]
                for key, part in self.opened[name].named_children():
                    self._add(f"{name}.{key}".lstrip("."), part, self._obstacles.to_saving(part))
            return True
        elif (obstacle := self._obstacles.to(module)) is not None:
            self._add(name, module, obstacle)
            return obstacle in ("quantized", "parametrized")
        return False

    def _add(self, name: str, module: nn.Module, reason: str) -> None:
        if reason:
            self._leave_alone(name, module, reason)
            return
        kind = low_rank_type(module)
        assert kind is not None
        full = kind.like(module, 0).full_rank
        row = SurveyedLayer(name, type(module).__name__, _largest_shape(module), full, full)
        self.rows[name], self.dense[name] = row, module

    def _leave_alone(self, name: str, module: nn.Module, reason: str) -> None:
        kind, shape = type(module).__name__, _largest_shape(module)
        self.rows[name] = SurveyedLayer(name, kind, shape, left_alone=reason)

    def _share_tied(self) -> None:
        """Plan one factor pair for each embedding that is tied to exactly one linear head."""
        for (name, embedding), (head, linear) in self._obstacles.tied_heads():
            reason = self._obstacles.to_sharing(embedding, linear)
            self._add(name, embedding, reason)
            if not reason:
                self.heads[head], self._linear[head] = name, linear
                why = f"shares the factors of {name}"
                self.rows[head] = replace(self.rows[head], left_alone=why)

    def _apply_choice(self, where: Where | None, *, keep: bool) -> None:
        """Mark the rows that `only` or `skip` rules out; refuse a pattern that matches nothing."""
        if where is None:
            return
        option = "only" if keep else "skip"
        found: dict[str, str] = {}
        if callable(where):
            layers = self.dense | self._linear
            found = {name: "" for name, module in layers.items() if where(name, module)}
        else:
            several = isinstance(where, Iterable) and not isinstance(where, str)
            for pattern in where if several else [where]:
                if not isinstance(pattern, str):
                    raise OptionError(
                        f"{option} has {pattern!r}, which is no pattern. Give names or glob "
                        "patterns as text, or a predicate (name, module) -> bool."
                    )
                hits = [name for name in self.rows if matches(name, pattern)]
                if not hits:
                    raise LayerError(
                        f"{option} pattern {pattern!r} matches no layer."
                        f"{nearest(pattern, self.rows)} Layers that can be decomposed: "
                        f"{listed(self.dense)}."
                    )
                found |= dict.fromkeys(hits, f" ({pattern})")
        if not keep:  # who skips a head skips its embedding, which could not stay tied
            found |= {emb: found[head] for head, emb in self.heads.items() if head in found}
        for name in self.wanted():
            if (name in found) is not keep:
                reason = "not among only" if keep else f"skipped as asked{found[name]}"
                self.rows[name] = replace(self.rows[name], rank=None, left_alone=reason)
                for head in [h for h, embedding in self.heads.items() if embedding == name]:
                    del self.heads[head]
                    self.rows[head] = replace(self.rows[head], left_alone=reason)

    def _apply_ranks(self, ranks: Ranks) -> None:
        """Set the ranks of the rows that are to be decomposed; refuse ranks for any other row."""
        for key in ranks if isinstance(ranks, Mapping) else ():
            row = self.rows.get(key)
            if row is not None and row.left_alone:
                raise LayerError(f"ranks names {key!r}, which is left alone: {row.left_alone}.")
            if row is not None and row.low_rank:
                raise LayerError(
                    f"ranks names {key!r}, which is low-rank already (rank {row.rank}). "
                    "Use at_ranks or extract to run it at a smaller rank."
                )
        usable = [row for row in self.rows.values() if row.rank is not None]
        limits = {row.name: (row.full_rank or 0, row.full_rank or 0) for row in usable}
        given = [{key: ranks[key]} for key in ranks] if isinstance(ranks, Mapping) else [ranks]
        for part in given:
            chosen = resolve(part, limits)
            rows = [self.rows[name] for name in chosen]
            if all(row.low_rank for row in rows) and any(r.rank != chosen[r.name] for r in rows):
                self.without_effect = f"ranks={part!r}"
        for name, rank in resolve(ranks, limits).items():
            if not self.rows[name].low_rank:
                self.rows[name] = replace(self.rows[name], rank=rank)


def _largest_shape(module: nn.Module) -> tuple[int, ...]:
    own = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    return tuple(max(own, key=lambda p: p.numel()).shape) if own else ()


STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


class _Obstacles:
    """What stands in the way of decomposing the modules of one model."""

    def __init__(self, model: nn.Module) -> None:
        # memory -> who has it: (name of the module, of the parameter, the module)
        self._owners: dict[int, list[tuple[str, str, nn.Module]]] = defaultdict(list)
        self._holders: dict[int, str] = {}  # module -> the attribute that also holds it
        self._keepers: dict[int, str] = {}  # memory of a parameter -> the attribute with it
        self._readers: dict[int, str] = {}  # module -> the class whose code reads its weight
        self._wrappers: dict[int, str] = {}  # module -> the class of the adapter around it
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not is_lazy(parameter) and parameter.numel():
                    self._owners[_memory(parameter)].append((name, key, module))
            for key, value in vars(module).items():
                if key in ("_modules", "_parameters", "_flat_weights"):  # the last is torch's own
                    continue
                where = f"{name}.{key}".lstrip(".")
                for held in held_in(value):
                    if isinstance(held, nn.Module):
                        self._holders[id(held)] = where
                    elif isinstance(held, nn.Parameter) and not is_lazy(held):
                        self._keepers[_memory(held)] = where
            if "base_layer" in module._modules:  # as PEFT and others call what they adapt
                inner = (m for child in module.children() for m in child.modules())
                self._wrappers |= {id(m): type(module).__name__ for m in inner}
            read = weights_read_by(type(module))  # type: ignore[arg-type]
            for path in read:
                self._readers[id(_descendant(module, path))] = type(module).__name__

    def to(self, module: nn.Module) -> str | None:
        """Return why a module cannot be decomposed, '' if it can, None if there is nothing to."""
        if low_rank_type(module) is not None:
            return self._to_layer(module)
        own = [p for p in module._parameters.values() if p is not None]
        if ".quantized." in type(module).__module__ and not isinstance(module, nn.Sequential):
            return "quantized"
        if parametrize.is_parametrized(module):
            return "parametrized"
        if any(is_lazy(p) for p in own):
            return "lazy: its shape is not known before the first forward"
        if all(p.ndim < 2 for p in own):
            return None
        for base in type(module).__mro__[1:]:
            if low_rank_type_of(base) or base in OPENED_TYPE:
                return f"a subclass of {base.__name__}, whose forward may differ"
        return f"{type(module).__name__} is not a supported kind"

    def _to_layer(self, module: nn.Module) -> str:
        if reason := self._to_weight(module):
            return reason
        tied = self._to_owner(module._parameters["weight"])  # type: ignore[arg-type]
        return tied or self._to_replacing(module) or self.to_saving(module)

    def to_sharing(self, embedding: nn.Module, head: nn.Module) -> str:
        """Return why a tied embedding and head cannot be one factor pair, '' if they can."""
        for module in (embedding, head):
            if reason := self._to_weight(module) or self._to_replacing(module):
                return reason
        return self.to_saving(embedding)

    def _to_weight(self, module: nn.Module) -> str:
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed by a hook (weight norm, spectral norm, pruning)"
        if extra := module._parameters.keys() - {"weight", "bias"}:
            return f"it has further parameters ({', '.join(sorted(extra))})"
        if isinstance(module, nn.Embedding):
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if value := getattr(module, option):
                    return f"{option}={value} acts on rows of a dense weight"
        return self._to_parameter(weight)

    def to_opening(self, module: nn.Module) -> str:
        """Return why a layer with several weights must stay closed, '' if nothing says so."""
        usual = nn.modules.linear.NonDynamicallyQuantizableLinear
        if isinstance(module, nn.MultiheadAttention) and type(module.out_proj) is not usual:
            return f"its out_proj is a {type(module.out_proj).__name__}"
        missing = [key for key in _weight_names(module) if module._parameters.get(key) is None]
        if missing or parametrize.is_parametrized(module):
            return "its weights are computed (weight norm, spectral norm, pruning, parametrized)"
        for parameter in module.parameters():
            if reason := self._to_parameter(parameter) or self._to_owner(parameter):
                return reason
        return self._to_replacing(module)

    def _to_parameter(self, weight: nn.Parameter) -> str:
        if type(weight) is not nn.Parameter or weight.dtype not in _DTYPES:
            return f"its weight is a {type(weight).__name__} of {weight.dtype}"
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return "its weight carries tensor hooks, which its factors could not honour"
        return ""

    def _to_owner(self, weight: nn.Parameter) -> str:
        owners = self._owners[_memory(weight)] if weight.numel() else []
        if len(owners) > 1:
            names = (f"{name}.{key}".lstrip(".") for name, key, _ in owners)
            return f"its weight is tied ({' = '.join(names)})"
        return ""

    def _to_replacing(self, module: nn.Module) -> str:
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        if id(module) in self._holders:
            return f"it is also held by {self._holders[id(module)]}, which torch does not look into"
        for key, parameter in module.named_parameters():
            where = self._keepers.get(_memory(parameter)) if parameter.numel() else None
            if where is not None and key != "bias":  # which stays the same Parameter
                return f"its {key} is also in {where}, which would keep it. Fill that afterwards"
        if foreign := set(module._modules) - {"out_proj"}:
            return f"it has a submodule of its own ({', '.join(sorted(foreign))})"
        names = vars(module).keys() | module._buffers.keys()
        if hidden := names & _names_only_ours(type(module)):
            return f"a low-rank layer would hide its attribute {', '.join(sorted(hidden))}"
        if any(getattr(module, hooks) for hooks in STATE_HOOKS):
            return "it carries hooks of its state dict, which expect a dense weight"
        if id(module) in self._wrappers:
            return f"it is wrapped by {self._wrappers[id(module)]}, which may change its weight"
        if id(module) in self._readers:
            return f"the code of {self._readers[id(module)]} reads its weight"
        return ""

    def to_saving(self, module: nn.Module) -> str:
        """Return that no rank is worth it, '' if some rank is."""
        kind = low_rank_type(module)
        assert kind is not None
        probe = kind.like(module, 0)
        if probe.weights(1) >= probe.dense_weights:
            m, n = probe.matrix_shape
            per_group = " per group" if probe.groups > 1 else ""
            return f"no rank saves anything ({m}×{n}{per_group})"
        return ""

    def tied_heads(self) -> list[tuple[tuple[str, nn.Embedding], tuple[str, nn.Linear]]]:
        """Return each embedding that is tied to exactly one linear head with it, by name."""
        pairs = []
        for owners in self._owners.values():
            tables = [(name, m) for name, _, m in owners if type(m) is nn.Embedding]
            heads = [(name, m) for name, _, m in owners if type(m) is nn.Linear]
            if len(owners) == 2 and len(tables) == len(heads) == 1:
                table, head = tables[0][1].weight, heads[0][1].weight
                # not, say, a transposed view, or some rows
                if table.shape == head.shape and table.stride() == head.stride():
                    pairs.append((tables[0], heads[0]))
        return pairs


def held_in(value: Any) -> Iterator[nn.Module | Tensor]:
    """Find what an attribute holds: itself, in plain containers, or bound to a function."""
    waiting, seen = [value], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, nn.Module | Tensor):
            yield part
        elif id(part) not in seen:  # containers may hold themselves
            seen.add(id(part))
            if isinstance(part, dict):
                waiting += part.values()
            elif isinstance(part, list | tuple | set):
                waiting += part
            elif isinstance(part, functools.partial):
                waiting += [part.func, part.args, part.keywords]
            elif isinstance(part, types.MethodType):
                waiting.append(part.__self__)
            elif isinstance(part, types.SimpleNamespace):
                waiting += vars(part).values()


def _names_only_ours(dense: type[nn.Module]) -> set[str]:
    """Return the names that mean something on what replaces a layer, and nothing on the layer."""
    kinds: list[type[nn.Module] | None] = [low_rank_type_of(dense), OPENED_TYPE.get(dense)]
    if dense is nn.Linear:
        kinds.append(SharedHead)
    ours = {name for kind in kinds if kind is not None for name in _names(kind)}
    return {name for name in ours - _names(dense) if not name.startswith("_")}


def _names(kind: type[nn.Module]) -> set[str]:
    """Return the names that a class says its instances have, beside those of every module."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    said = {name for base in own for name in (*vars(base), *inspect.get_annotations(base))}
    return said | set(getattr(kind, "__constants__", ()))


def _descendant(module: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = module
    for key in path.split("."):
        found = None if found is None else found._modules.get(key)
    return found


def _weight_names(module: nn.Module) -> list[str]:
    """Return the names of the weights that a closed layer must own as parameters."""
    if isinstance(module, nn.MultiheadAttention):
        separate = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        return ["in_proj_weight"] if module._qkv_same_embed_dim else separate
    assert isinstance(module, nn.RNNBase)
    return [name for names in module._all_weights for name in names]


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Of weights that can be factored and trained."""


def _memory(parameter: torch.Tensor) -> int:
    """Return what two parameters have in common iff they are tied."""
    return id(parameter) if parameter.is_meta else parameter.data_ptr()


_NO_FORWARD = re.compile("(^|_)(init|reset|resize|tie|load|save|prune)(_|$)")
"""Names of methods that may well read weights: they do not run while the model computes."""

_READ = re.compile(
    r"\bself\.(\w+(?:\.\w+)*?)\."
    r"(?:weight\b|weight_[ih]\w+|all_weights\b|in_proj_\w+|[qkv]_proj_weight\b|out_proj\.weight\b)"
)
"""How code reads the weights of a submodule: of a plain layer, a recurrent one, attention."""


@functools.lru_cache(maxsize=1024)
def weights_read_by(kind: type) -> frozenset[str]:
    """Return the submodules whose weights a class reads in its code, outside of initialization.

    Such code takes a dense weight for granted: a fused kernel, or a check of its dtype. torch's own
    transformer layers do so in a fast path that is switched off instead.
    """
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):  # the last definition is the one that runs
        if not base.__module__.startswith("torch.nn."):
            members |= vars(base)
    found: set[str] = set()
    for name, member in members.items():
        method = member.fget if isinstance(member, property) else member
        if inspect.isfunction(method) and not _NO_FORWARD.search(name):
            found |= _weights_read_in(method)
    return frozenset(found)


@functools.lru_cache(maxsize=8192)
def _weights_read_in(method: Callable[..., Any]) -> frozenset[str]:
    try:
        source = inspect.getsource(method)
    except (OSError, TypeError):  # written interactively, or without source
        return frozenset()
    return frozenset(_READ.findall(source))
