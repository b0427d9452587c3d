"""Manifest of a directory of deployed files: the deployment, and a digest of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maestro_lod.errors import CheckpointError
from maestro_lod.files.atomic import open_regular, replacing
from maestro_lod.files.json_files import read_json_file

MANIFEST, _DIGESTS = "deploy.json", "sha256"
_PIECE = 2**20


def write_manifest(directory: Path, deployment: Mapping[str, Any]) -> None:
    """Write the manifest of a directory, after all other files."""
    digests = {file.name: _sha256(file) for file in sorted(directory.iterdir())}
    with replacing(directory / MANIFEST) as manifest:
        manifest.write_text(json.dumps({**deployment, _DIGESTS: digests}, indent=1))


def read_digests(directory: Path) -> dict[str, str] | None:
    """Return the digest of every file of a directory by its name; None if none were stored."""
    manifest = directory / MANIFEST
    if not manifest.exists():
        return None
    digests: dict[str, str] = read_json_file(manifest, {f"{_DIGESTS}?": {str: str}}).get(_DIGESTS)
    if digests is None:
        return None
    if wrong := [n for n in digests if not (n and n.isprintable() and n == Path(n).name)]:
        raise CheckpointError(f"{manifest} is damaged: {wrong[0]!r:.80} is not the name of a file.")
    return digests


def matches_manifest(file: Path) -> bool:
    """Raise CheckpointError if a file differs from its manifest; False without any digests."""
    digests = read_digests(file.parent)
    if digests is None:
        return False
    if file.name not in digests:
        raise CheckpointError(f"{MANIFEST} does not list it: it was added later.")
    try:
        digest = _sha256(file)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} lists it, but it is missing.") from None
    except OSError as error:
        raise CheckpointError(f"it cannot be read ({error.strerror or error}).") from error
    if digest != digests[file.name]:
        raise CheckpointError(f"its SHA-256 differs from the one in {MANIFEST}.")
    return True


def _sha256(file: Path) -> str:
    digest = hashlib.sha256(usedforsecurity=False)
    with open_regular(file) as data:
        while piece := data.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
