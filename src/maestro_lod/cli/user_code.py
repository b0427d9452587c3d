"""Code that a recipe names as its user's own: how it is found and called, and what is said."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from maestro_lod.errors import MaestroError, OptionError, listed, suggest


class OwnCodeError(MaestroError, RuntimeError):
    """Code that a recipe names as its user's own has failed; the cause is what it raised."""


def names_own_code(settings: Mapping[str, Any]) -> bool:
    """Return whether settings, as they are written, name a function of their user's own."""
    chosen = (settings.get(key) for key in ("model", "data", "loss", "method"))
    names = (part.get("name") if isinstance(part, Mapping) else part for part in chosen)
    return any(isinstance(name, str) and ":" in name for name in names)


def _make_importable(module: str, code: object) -> None:
    """Search a folder for modules too if it has this one; after all others, so it shadows none."""
    top = module.partition(".")[0]
    installed = PathFinder.find_spec(top)
    if top in sys.modules or (installed is not None and installed.loader is not None):
        return
    for folder in [code] * isinstance(code, str | Path) + [Path.cwd()]:
        if PathFinder.find_spec(top, [str(folder)]) is not None:
            sys.path.append(str(folder))
            return


def own_function(name: str, what: str, code: object = None) -> Callable[..., Any]:
    """Import a user's `package.module:function`, whose consent is there.

    Modules that are not installed are searched in the folder `code` and the working directory.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise OptionError(f"{what} {name!r} must be written as package.module:function.")
    _make_importable(module_name, code)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise OptionError(
            f"{what} {name!r}: cannot import {module_name!r} ({error}). Modules are searched in "
            "the working directory and in the recipe's setting `code`: the folder it was in when "
            "its run began. If they have moved, start lod beside them or change `code`."
        ) from None
    except Exception as error:
        raise failure(f"{what} {name!r} cannot be imported", error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise OptionError(
            f"{what} {name!r}: {module_name} has no function {attribute!r}."
            f"{suggest(attribute, known)}"
        )
    return function  # type: ignore[no-any-return]


def parameters_of(function: Callable[..., Any], what: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError as error:  # some that are written in C
        raise OptionError(f"{what} cannot be called: {error}.") from None


def called(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """Call a function with options, or say which of them it cannot take."""
    parameters = parameters_of(function, what)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in parameters:
                raise OptionError(
                    f"{what} takes no {option!r}.{suggest(option, parameters)} It takes: "
                    f"{listed(parameters, 12)}."
                )
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise OptionError(f"{what}: {error}.") from None
    try:
        return function(**options)
    except MaestroError:
        raise
    except Exception as error:
        raise failure(f"{what} failed", error, own=":" in what) from error


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the closest known name, or with a colon for `package.function`."""
    module, _, function = name.rpartition(".")
    if all(part.isidentifier() for part in (*module.split("."), function)):
        return f" Did you mean '{module}:{function}'?"
    return suggest(name, known)


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    return (
        f"there is no {what} {name!r}.{nearest_name(name, known)} Known: {listed(known, 12)}; "
        "or name your own as package.module:function."
    )


def failure(what: str, error: Exception, own: bool = True) -> MaestroError:
    """Blame a user's own code if there is any in it, or else the options that were given."""
    return (OwnCodeError if own else OptionError)(f"{what}: {type(error).__name__}: {error}")


def with_article(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
