"""Hooks of mkdocs: order of the pages, and pages and pictures outside of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
ORDER = {
    "Start": ["index", "quickstart", "first-hour", "own-model", "sizes", "deploy", "output", "faq"],
    "Train": ["recipes", "tuning", "data", "models", "layers", "methods", "pretrained", "trainers"],
    "Integrations": ["huggingface", "distributed", "federated", "scale"],
    "Background": ["idea", "reliability", "compare"],
    "Measurements": ["measured", "benchmarks/pretrained", "paper/index"],
    "Reference": ["api", "glossary", "release", "contributing"],
}
"""Pages by section; pages that do not exist are left out, pages that are not named come last."""

ELSEWHERE = {
    "README.md": "index.md",
    "paper/README.md": "paper/index.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


class _Examples(Preprocessor):
    """Turns `>>>` lines of docstrings, which Markdown takes for quotations, into code blocks."""

    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        return re.sub(r"(?m)(^>>> .*(?:\n(?:>>>|\.\.\.)(?: .*)?$)*)", _fenced, text).split("\n")


def _fenced(example: re.Match[str]) -> str:
    code = re.sub(r"(?m)^(>>>|\.\.\.) ?", "", example[0])
    return f"```python\n{code}\n```"


class _ExamplesAreCode(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Examples(md), "examples", 40)  # before code blocks are parsed


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(_ExamplesAreCode())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside of docs/ and the pictures that they show."""
    for source, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for picture in sorted((ROOT / "paper" / "results").glob("*.svg")):
        place = f"paper/results/{picture.name}"
        files.append(File.generated(config, place, abs_src_path=str(picture)))
    config.nav = _nav({file.src_uri for file in files.documentation_pages()})
    return files


def _nav(pages: set[str]) -> list[dict[str, list[str]]]:
    known = {section: [f"{p}.md" for p in names] for section, names in ORDER.items()}
    named = {page for names in known.values() for page in names}
    nav = [{section: [p for p in names if p in pages]} for section, names in known.items()]
    others = sorted(pages - named)
    return nav + ([{"More": others}] if others else [])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links to pages of the site; a link to a file that is not a page becomes its text."""
    source = {place: where for where, place in ELSEWHERE.items()}
    here = ROOT / source.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    known = {file.src_uri for file in files}
    up = "../" * page.file.src_uri.count("/")

    def pointed(link: re.Match[str]) -> str:
        mark, text, target, place = link[1], link[2], link[3], link[4] or ""
        found = (here.parent / target).resolve()
        if not found.is_relative_to(ROOT) or not found.exists():
            return link[0]  # which a strict build refuses
        name = found.relative_to(ROOT).as_posix()
        name = ELSEWHERE.get(name, name.removeprefix("docs/"))
        return f"{mark}[{text}]({up}{name}{place})" if name in known else text

    return _LINK.sub(pointed, markdown)
