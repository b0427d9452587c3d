"""Cache directory of the program."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return $LOD_CACHE, or ~/.cache/maestro-lod."""
    return Path(os.environ.get("LOD_CACHE") or Path.home() / ".cache" / "maestro-lod")
