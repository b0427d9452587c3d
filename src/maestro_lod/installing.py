"""How an extra of this library is installed, from wherever the library itself came."""

from __future__ import annotations

import json
from importlib import metadata
from urllib.parse import urlparse
from urllib.request import url2pathname

_NAME = "maestro-lod"


def install(extra: str) -> str:
    """Return the command that adds an extra: for a checkout or a file it names that place."""
    place, editable = _origin()
    return f"pip install {'--editable ' if editable else ''}'{place}[{extra}]'"


def _origin() -> tuple[str, bool]:
    """Return what pip was given, as far as it says so, and whether it is edited in place."""
    try:
        text = metadata.distribution(_NAME).read_text("direct_url.json")
        noted = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return _NAME, False
    url = urlparse(str(noted.get("url", "")))
    if url.scheme != "file":
        return _NAME, False
    return url2pathname(url.path), bool(noted.get("dir_info", {}).get("editable"))
