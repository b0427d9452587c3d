"""The documentation keeps its promises: its code runs, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import maestro_lod as lod

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
RUN = ("quickstart", "own-model", "sizes", "api")


def code_of(page: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_from_its_beginning_to_its_end(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "quickstart":
        pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    blocks = code_of(page)
    assert blocks
    for place, block in enumerate(blocks):
        exec(compile(block, f"{page}.md, block {place + 1}", "exec"), names)
    lod.show_progress(None)
    if page == "quickstart":
        done = names["done"]
        assert done.history[-1].relative_params <= 0.25  # type: ignore[attr-defined]
        assert done.history[-1].validation["accuracy"] > 0.9  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.stem)
def test_every_link_of_a_page_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_every_public_name_is_in_the_reference_with_an_example() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    described = {
        place.rpartition(".")[2] for place in re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    }
    assert described == {*lod.__all__}
    examples = "".join(code_of("api"))
    for name in lod.__all__:
        assert f"lod.{name}" in examples, name
