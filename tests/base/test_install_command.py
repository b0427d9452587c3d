"""The command that adds an extra is true for a checkout, a file and an index."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from maestro_lod.text import install_command


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (
            {"url": "file:///home/me/lod", "dir_info": {"editable": True}},
            "pip install --editable '/home/me/lod[export]'",
        ),
        ({"url": "file:///home/me/a%20b", "dir_info": {}}, "pip install '/home/me/a b[export]'"),
        ({"url": "file:///tmp/x.whl", "archive_info": {}}, "pip install '/tmp/x.whl[export]'"),
        ({"url": "https://example.org/x.whl"}, "pip install 'maestro-lod[export]'"),
        (None, "pip install 'maestro-lod[export]'"),
    ],
)
def test_the_command_names_where_the_library_came_from(
    noted: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if noted is None else json.dumps(noted)
    found = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)
    assert install_command("export") == command


def test_a_library_that_was_never_installed_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command("cli") == "pip install 'maestro-lod[cli]'"
