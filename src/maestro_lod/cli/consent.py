"""Consent to the code that a run directory names: a directory from elsewhere runs nothing unasked.

Settings may name any `package.module:function` to be imported and called. Whoever trains a recipe
has chosen its functions; that is remembered in the file `trusted` of the cache folder, as a digest
of the functions with their options. Of any other directory they need a word of consent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from maestro_lod.cli.cache_directory import cache_directory
from maestro_lod.errors import OptionError, listed


def require_trust(settings: Mapping[str, Any], source: Path) -> None:
    """Refuse settings that name functions which were not trained with here; imports nothing."""
    functions = _functions(settings)
    if not functions or os.environ.get("LOD_TRUST") == "1" or _digest(functions) in _trusted():
        return
    shown = listed(f"{key} {function['name']}" for key, function in functions.items())
    raise OptionError(
        f"{source} names code to run, {shown}, and was not trained here by you. If you trust it, "
        "say so: --trust, or LOD_TRUST=1; Run.open(…, trust=True) in Python."
    )


def remember_trust(settings: Mapping[str, Any]) -> None:
    """Note that the functions which settings name are this user's own choice."""
    functions = _functions(settings)
    if not functions or _digest(functions) in _trusted():
        return
    with suppress(OSError):  # then they will be asked for consent
        _file().parent.mkdir(parents=True, exist_ok=True)
        with _file().open("a", encoding="ascii") as file:
            file.write(f"{_digest(functions)}\n")


def _functions(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the functions that settings name, by what they are for, with their options."""
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
