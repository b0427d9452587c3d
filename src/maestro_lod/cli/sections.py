"""Sections of a recipe: typed settings that refuse what they do not know."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import (
    Annotated,
    Any,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


# YAML reads 128e-5 as text, so numbers may come as text; whole numbers and switches may not
Number = Annotated[float, BeforeValidator(_no_switch)]
Share = Annotated[Number, Field(ge=0.0, lt=1.0)]
Positive = Annotated[Number, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[Number, Field(ge=0.0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """Settings that refuse keys they do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# -- sections that the library defines as dataclasses ------------------------------------------

T = TypeVar("T")


@functools.cache
def section_of(kind: type) -> type[Section]:
    """Return the section whose keys are the fields of a dataclass, with the same checks."""

    def consistent(section: Section) -> Section:
        as_dataclass(kind, section)  # which refuses what does not go together
        return section

    check: Any = model_validator(mode="after")(consistent)
    return create_model(
        kind.__name__,
        __base__=Section,
        __validators__={"consistent": check},
        **fields_of(kind),
    )


def fields_of(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass as pydantic takes them."""
    hints = get_type_hints(kind)
    return {entry.name: _field(entry, hints[entry.name]) for entry in dataclasses.fields(kind)}


def _field(entry: dataclasses.Field[Any], hint: Any) -> tuple[Any, Any]:
    said = entry.metadata
    if choices := said.get("choices"):
        hint = Literal[tuple(choices)]
    elif check := said.get("check"):
        hint = Annotated[hint, BeforeValidator(check)]
    else:
        hint = _strict(hint, said.get("least"))
    default: Any = entry.default
    if entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    kind: type = type(default)
    if dataclasses.is_dataclass(kind):
        default = section_of(kind)()
    return hint, Field(
        ... if default is dataclasses.MISSING else default, description=said.get("meaning")
    )


def _strict(hint: Any, least: float | None) -> Any:
    """Return a type that takes what YAML means by it, and nothing else."""
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_strict(part, least) for part in get_args(hint))]  # noqa: UP007
    if _is_dataclass(hint):
        return section_of(hint)
    strict = {
        bool: Switch,
        int: Annotated[int, Field(ge=least, strict=True)],
        float: Annotated[Number, Field(ge=least, allow_inf_nan=False)],
    }
    return strict.get(hint, hint)


def as_dataclass(kind: type[T], section: BaseModel) -> T:
    """Return the values of a section as the dataclass that it was made of."""
    hints = get_type_hints(kind)
    values = {}
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = getattr(section, entry.name)
        if isinstance(value, Section):
            value = as_dataclass(_dataclass_in(hints[entry.name]), value)
        values[entry.name] = value
    return kind(**values)


def _dataclass_in(hint: Any) -> type:
    """Return the dataclass that a type is, or that is one of its alternatives."""
    return next(kind for kind in (hint, *get_args(hint)) if _is_dataclass(kind))


def _is_dataclass(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)
