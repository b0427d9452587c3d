"""Manifest of a directory of deployed files: the deployment, and a digest of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maestro_lod.errors import CheckpointError
from maestro_lod.files import read_json, replacing

MANIFEST, _DIGESTS = "deploy.json", "sha256"
_PIECE = 2**20


def write_manifest(directory: Path, deployment: Mapping[str, Any]) -> None:
    """Write the manifest of a directory whose files are all there."""
    digests = {file.name: _digest_of(file) for file in sorted(directory.iterdir())}
    with replacing(directory / MANIFEST) as manifest:
        manifest.write_text(json.dumps({**deployment, _DIGESTS: digests}, indent=1))


def read_digests(directory: Path) -> dict[str, str] | None:
    """Return the digest of every file of a directory by its name; None if none were stored."""
    manifest = directory / MANIFEST
    try:
        record = read_json(manifest.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{manifest} cannot be read ({error}).") from error
    digests = record.get(_DIGESTS) if isinstance(record, dict) else {}
    if digests is None:
        return None
    if not isinstance(digests, dict) or not all(
        isinstance(digest, str) and name.isprintable() and name and name == Path(name).name
        for name, digest in digests.items()
    ):
        raise CheckpointError(f"{manifest} is damaged: its {_DIGESTS} must give files digests.")
    return digests


def matches_manifest(file: Path) -> bool:
    """Refuse a file that is not as its manifest says; False if no digest of it was stored."""
    digests = read_digests(file.parent)
    if digests is None:
        return False
    if file.name not in digests:
        raise CheckpointError(f"{MANIFEST} does not list it: it was put there later.")
    try:
        digest = _digest_of(file)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} lists it, and it is missing.") from None
    except OSError as error:
        raise CheckpointError(f"it cannot be read ({error.strerror or error}).") from error
    if digest != digests[file.name]:
        raise CheckpointError(f"its SHA-256 is not the one in {MANIFEST}.")
    return True


def _digest_of(file: Path) -> str:
    digest = hashlib.sha256(usedforsecurity=False)
    with file.open("rb") as data:
        while piece := data.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
