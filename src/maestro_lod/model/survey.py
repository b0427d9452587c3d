"""Survey: the layers that can be decomposed, and the reasons why others stay dense."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from torch import nn
from torch.nn.parameter import is_lazy

from maestro_lod.errors import LayerError, OptionError, RankError, listed, suggest
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import Ranks, matches, resolve, unwrapped
from maestro_lod.layers.registry import unpacked_type
from maestro_lod.layers.uses import module_role
from maestro_lod.model.blockers import Blockers
from maestro_lod.model.structure import UNPACKED, Form, Structure, read_structure, uninitialized
from maestro_lod.text import table

Where = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""A choice of layers: a glob pattern, several, or a predicate (name, module) -> bool."""

Tied = Literal["keep", "share"]
"""The treatment of an embedding that is tied to an output head: stay dense, or share factors."""


@dataclass(frozen=True)
class SurveyedLayer:
    """One layer with a weight matrix, and the reason if it stays dense."""

    name: str
    kind: str
    shape: tuple[int, ...]
    full_rank: int | None = None
    """None for kinds that cannot be decomposed."""
    rank: int | None = None
    """The current or planned rank of the layer; None if it stays dense."""
    low_rank: bool = False
    """Whether the layer is low-rank now."""
    left_alone: str = ""
    """The reason why the layer stays dense; empty if it is, or can be, low-rank."""
    break_even: int | None = None
    """The largest rank at which the factors have no more weights than the dense layer."""
    slow: str = ""
    """The reason why steps of the layer are hardly faster even below break-even; else empty."""

    def __str__(self) -> str:
        if self.left_alone:
            return self.left_alone
        state = "low-rank" if self.low_rank else "can be decomposed"
        return f"{state}; {self.slow}" if self.slow else state


@dataclass(frozen=True)
class Survey:
    """The result of `decompose` for each layer, with reasons: data, and a table when printed."""

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
                "" if row.rank is None else str(row.break_even),
                str(row),
            )
            for row in self.layers
        ]
        columns = ("layer", "kind", "weight", "rank", "saves up to", "")
        return table(columns, rows, right=(3, 4))


def survey(
    model: nn.Module,
    *,
    only: Where | None = None,
    skip: Where | None = None,
    ranks: Ranks | None = None,
    tied: Tied = "keep",
) -> Survey:
    """List the result of `decompose` for each layer, with reasons; changes nothing.

    Every module that owns a weight matrix is listed, attention and recurrent layers by their
    parts. For a decomposed model, low-rank layers are listed with their ranks and the others with
    their reasons. A layer saves weights up to its break-even rank; above it, its factors have
    more than the dense layer.

    Args:
        model: A dense or decomposed model.
        only: As for `decompose`.
        skip: As for `decompose`.
        ranks: As for `decompose`.
        tied: As for `decompose`.

    Returns:
        The survey: data, and a table when printed.

    Raises:
        LayerError: If a pattern matches no layer.
        RankError: If a layer cannot have the rank.
        OptionError: If an option is invalid.

    Example:
        >>> print(lod.survey(nn.Sequential(nn.Linear(64, 32))))  # doctest: +ELLIPSIS
        layer  kind ...
    """
    return Survey(tuple(Plan(model, only=only, skip=skip, ranks=ranks, tied=tied).rows.values()))


class Plan:
    """A survey together with the modules of its rows."""

    rows: dict[str, SurveyedLayer]
    dense: dict[str, nn.Module]
    """The dense layer behind each row that can be decomposed."""
    unpacked: dict[str, list[str]]
    """The layers with several weights, each with the names of its parts."""
    heads: dict[str, str]
    """The names of output heads that would share factors, with those of their embeddings."""
    without_effect: str = ""
    """The part of `ranks` that would change nothing, as text."""

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
                "the model is inside DistributedDataParallel, which would still use the old "
                "parameters. Decompose the model first, then wrap it."
            )
        model = unwrapped(model)
        self.rows, self.dense, self.unpacked, self.heads = {}, {}, {}, {}
        self._linear: dict[str, nn.Module] = {}  # the heads themselves
        self._model = model
        self._blockers = Blockers(model)
        done: set[int] = set()  # inside layers that were examined as a whole
        for name, module in model.named_modules():
            if id(module) not in done and self._examine(name, module):
                done |= {id(inner) for inner in module.modules()}
        if tied == "share":
            self._share_tied()
        self._apply_choice(only, keep=True)
        self._apply_choice(skip, keep=False)
        if ranks is not None:
            self._apply_ranks(ranks)

    def planned(self) -> dict[str, int]:
        """Return the layers to decompose, with their ranks."""
        return {
            name: row.rank
            for name, row in self.rows.items()
            if row.rank is not None and not row.low_rank
        }

    def structure(self, ranks: Mapping[str, int] | None = None) -> Structure:
        """Return the structure of the decomposed model, at the planned ranks or at these."""
        ranks = self.planned() if ranks is None else ranks
        layers = {name: Form("low-rank", rank) for name, rank in ranks.items()}
        unpacked = {n: UNPACKED for n, parts in self.unpacked.items() if layers.keys() & set(parts)}
        structure = {**read_structure(self._model), **unpacked, **layers}
        heads = {h: Form("shared", embedding=e) for h, e in self.heads.items() if e in structure}
        return {**structure, **heads}

    def _examine(self, name: str, module: nn.Module) -> bool:
        """List one module; return whether its submodules are done with it."""
        role, layer = module_role(module), cast("Any", module)
        if role == "low-rank":
            row = SurveyedLayer(name, layer.kind, tuple(layer.weight_shape), low_rank=True)
            self.rows[name] = _with_ranks(row, layer, layer.rank)
        elif role == "shared":
            shape = tuple(layer.embedding.weight_shape)
            reason = "uses the factors of its embedding"
            self.rows[name] = SurveyedLayer(name, "SharedHead", shape, left_alone=reason)
        elif (unpacked := unpacked_type(type(module))) is not None:
            if reason := self._blockers.unpacking_reason(module):
                self._leave_alone(name, module, reason)
            else:
                parts = {f"{name}.{k}".lstrip("."): p for k, p in unpacked(module).named_children()}
                self.unpacked[name] = list(parts)
                for part_name, part in parts.items():
                    self._add(part_name, part, self._blockers.saving_reason(part))
            return True
        elif (blocker := self._blockers.reason(module)) is not None:
            self._add(name, module, blocker)
            return blocker in ("quantized", "parametrized")
        return False

    def _add(self, name: str, module: nn.Module, reason: str) -> None:
        if reason:
            self._leave_alone(name, module, reason)
            return
        layer = uninitialized(name, module, 0)
        row = SurveyedLayer(name, type(module).__name__, _largest_shape(module))
        self.rows[name] = _with_ranks(row, layer, layer.full_rank)
        self.dense[name] = module

    def _leave_alone(self, name: str, module: nn.Module, reason: str) -> None:
        kind, shape = type(module).__name__, _largest_shape(module)
        self.rows[name] = SurveyedLayer(name, kind, shape, left_alone=reason)

    def _share_tied(self) -> None:
        """Plan one factor pair for each embedding that is tied to exactly one linear head."""
        for (name, embedding), (head, linear) in self._blockers.tied_heads():
            reason = self._blockers.sharing_reason(embedding, linear)
            self._add(name, embedding, reason)
            if not reason:
                self.heads[head], self._linear[head] = name, linear
                why = f"shares the factors of {name}"
                self.rows[head] = replace(self.rows[head], left_alone=why)

    def _apply_choice(self, where: Where | None, *, keep: bool) -> None:
        """Mark the rows that `only` or `skip` excludes; raise if a pattern matches none."""
        if where is None:
            return
        option = "only" if keep else "skip"
        chosen: dict[str, str] = {}
        if callable(where):
            layers = self.dense | self._linear
            chosen = {name: "" for name, module in layers.items() if where(name, module)}
        else:
            several = isinstance(where, Iterable) and not isinstance(where, str)
            for pattern in where if several else [where]:
                if not isinstance(pattern, str):
                    raise OptionError(
                        f"{option} has {pattern!r}, which is not a pattern. Give names or glob "
                        "patterns as text, or a predicate (name, module) -> bool."
                    )
                hits = [name for name in self.rows if matches(name, pattern)]
                if not hits:
                    raise LayerError(
                        f"{option} pattern {pattern!r} matches no layer."
                        f"{suggest(pattern, self.rows)} Layers that can be decomposed: "
                        f"{listed(self.dense)}."
                    )
                chosen |= dict.fromkeys(hits, f" ({pattern})")
        if not keep:  # with a head its embedding is skipped, which could not stay tied
            chosen |= {emb: chosen[head] for head, emb in self.heads.items() if head in chosen}
        for name in self.planned():
            if (name in chosen) is not keep:
                reason = "not matched by only" if keep else f"matched by skip{chosen[name]}"
                self.rows[name] = replace(self.rows[name], rank=None, left_alone=reason)
                for head in [h for h, embedding in self.heads.items() if embedding == name]:
                    del self.heads[head]
                    self.rows[head] = replace(self.rows[head], left_alone=reason)

    def _apply_ranks(self, ranks: Ranks) -> None:
        """Set the ranks of the rows to decompose; raise LayerError for ranks of other rows."""
        if not isinstance(ranks, Mapping) and ranks == 0:
            raise RankError(
                "ranks=0 would leave nothing to train in any layer. Give at least 1, or 0 to some "
                'layers by name: ranks={"layer": 0}.'
            )
        for key in ranks if isinstance(ranks, Mapping) else ():
            row = self.rows.get(key)
            if row is not None and row.left_alone:
                raise LayerError(
                    f"ranks names {key!r}, which stays dense: {row.left_alone}. Leave it out."
                )
            if row is not None and row.low_rank:
                raise LayerError(
                    f"ranks names {key!r}, which is low-rank already (rank {row.rank}). "
                    "Use at_ranks or extract to run it at a smaller rank."
                )
        usable = [row for row in self.rows.values() if row.rank is not None]
        limits = {row.name: (row.full_rank or 0, row.full_rank or 0) for row in usable}
        parts = [{key: ranks[key]} for key in ranks] if isinstance(ranks, Mapping) else [ranks]
        for part in parts:
            chosen = resolve(part, limits)
            rows = [self.rows[name] for name in chosen]
            if all(row.low_rank for row in rows) and any(r.rank != chosen[r.name] for r in rows):
                self.without_effect = f"ranks={part!r}"
        for name, rank in resolve(ranks, limits).items():
            if not self.rows[name].low_rank:
                self.rows[name] = replace(self.rows[name], rank=rank)


def _with_ranks(row: SurveyedLayer, layer: LowRank, rank: int) -> SurveyedLayer:
    full, even = layer.full_rank, min(layer.break_even, layer.full_rank)
    return replace(row, full_rank=full, rank=rank, break_even=even, slow=layer.slow)


def _largest_shape(module: nn.Module) -> tuple[int, ...]:
    weights = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    return tuple(max(weights, key=lambda p: p.numel()).shape) if weights else ()
