"""User code that a recipe names as `package.module:function`: consent to it, import and call.

A run directory from elsewhere runs no code without consent. Training a recipe is consent to its
functions: a digest of them and their options goes into the file `trusted` of the cache folder. For
every other directory the user has to give it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from maestro_lod.cli.cache_directory import cache_directory
from maestro_lod.errors import MaestroError, OptionError, listed, suggest


class UserCodeError(MaestroError, RuntimeError):
    """User code that a recipe names has raised an exception, which is the cause of this one."""


def names_user_code(settings: Mapping[str, Any]) -> bool:
    """Return True if unchecked settings name a function as `module:function`."""
    chosen = (settings.get(key) for key in ("model", "data", "loss", "method"))
    names = (part.get("name") if isinstance(part, Mapping) else part for part in chosen)
    return any(isinstance(name, str) and ":" in name for name in names)


def _make_importable(module: str, code: object) -> None:
    """Append the folder that has a module to sys.path, at the end: it shadows no other module."""
    top = module.partition(".")[0]
    installed = PathFinder.find_spec(top)
    if top in sys.modules or (installed is not None and installed.loader is not None):
        return
    for folder in [code] * isinstance(code, str | Path) + [Path.cwd()]:
        if PathFinder.find_spec(top, [str(folder)]) is not None:
            sys.path.append(str(folder))
            return


def import_function(name: str, what: str, code: object = None) -> Callable[..., Any]:
    """Import a user's `package.module:function`; the caller has made sure of consent.

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
            "the working directory and in the folder of the recipe's setting `code`. If they have "
            "moved, start lod in their folder or change `code`."
        ) from None
    except Exception as error:
        raise user_error(f"{what} {name!r} cannot be imported", error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise OptionError(
            f"{what} {name!r}: {module_name} has no function {attribute!r}."
            f"{suggest(attribute, known)}"
        )
    return function  # type: ignore[no-any-return]


def parameters_of(function: Callable[..., Any], what: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; raise OptionError if they cannot be read."""
    try:
        return inspect.signature(function).parameters
    except ValueError as error:  # some functions in C have no signature
        raise OptionError(f"{what} cannot be called: {error}.") from None


def call_with_options(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """Call a function with options; raise OptionError for an option that it does not take."""
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
        raise user_error(f"{what} failed", error, own=":" in what) from error


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint: the closest known name, or a dotted name written with a colon."""
    module, _, function = name.rpartition(".")
    if all(part.isidentifier() for part in (*module.split("."), function)):
        return f" Did you mean '{module}:{function}'?"
    return suggest(name, known)


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that is neither built in nor a user function."""
    return (
        f"{what} {name!r} is unknown.{nearest_name(name, known)} Known: {listed(known, 12)}. "
        "Name a function of your own as package.module:function."
    )


def user_error(what: str, error: Exception, own: bool = True) -> MaestroError:
    """Return an error that blames user code if any was called, else the given options."""
    return (UserCodeError if own else OptionError)(f"{what}: {type(error).__name__}: {error}")


def with_article(value: object) -> str:
    """Return the type of a value with its article, such as `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


# -- consent -------------------------------------------------------------------------------------


def require_trust(settings: Mapping[str, Any], source: Path) -> None:
    """Raise OptionError if settings name functions without consent; imports nothing."""
    functions = _functions(settings)
    if not functions or os.environ.get("LOD_TRUST") == "1" or _digest(functions) in _trusted():
        return
    shown = listed(f"{key} {function['name']}" for key, function in functions.items())
    raise OptionError(
        f"{source} names code to run, {shown}, and was not trained here by you. If you trust it, "
        "give --trust, or set LOD_TRUST=1; in Python: Run.open(…, trust=True)."
    )


def remember_trust(settings: Mapping[str, Any]) -> None:
    """Record the user's consent to the functions that settings name."""
    functions = _functions(settings)
    if not functions or _digest(functions) in _trusted():
        return
    with suppress(OSError):  # the next command asks again
        _file().parent.mkdir(parents=True, exist_ok=True)
        with _file().open("a", encoding="ascii") as file:
            file.write(f"{_digest(functions)}\n")


def _functions(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the functions that settings name, and their options, by setting."""
    functions = {}
    for key in ("model", "data", "loss", "method"):
        chosen = settings.get(key)
        section = chosen if isinstance(chosen, Mapping) else {"name": chosen}
        name = section.get("name")
        if isinstance(name, str) and ":" in name:
            functions[key] = {"name": name, "options": section.get("options") or {}}
    if functions:  # the same names mean other functions elsewhere
        functions["code"] = {"name": str(settings.get("code") or Path.cwd()), "options": {}}
    return functions


def _digest(functions: Mapping[str, Any]) -> str:
    text = json.dumps(functions, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _file() -> Path:
    return cache_directory() / "trusted"


def _trusted() -> set[str]:
    try:
        return {*_file().read_text(encoding="ascii").split()}
    except (OSError, ValueError):
        return set()
