"""The documentation keeps its promises: its code runs, its links lead somewhere."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import maestro_lod as lod
from maestro_lod.cli.main import COMMANDS
from tests.support.directories import write_llama

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
ELSEWHERE = {
    "compare": "test_compare.py",  # trains for minutes: the same call is made there on a small task
    "deploy": "test_export.py",
    "distributed": "test_ddp.py and test_fsdp.py, in several processes",
    "models": "test_models.py",
    "recipes": "test_cli.py",
    "trainers": "test_trainers_page.py",
}
"""Pages whose code is run by other tests."""
FLOWER = "@server.main()"


def code_of(page: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


PAGES = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in DOCS]
RUN = [page for page in PAGES if page not in ELSEWHERE and code_of(page)]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 10))


class Client:
    """A client of a federation, as docs/federated.md speaks of one."""

    share, samples = 0.5, 10

    def train(self, model: nn.Module) -> None:
        model(torch.randn(3, 12)).sum().backward()


def given_to(page: str, block: str) -> dict[str, Any]:
    """Return what a block of a page takes as given: a model, data, a pretrained directory."""
    model, x = network(), torch.randn(8, 12)
    if page == "federated":
        return {"network": network, "rounds": 2, "clients": [Client(), Client()]}
    if page == "huggingface":
        ids = torch.arange(16).view(2, 8)
        from transformers import AutoModelForCausalLM

        llama = AutoModelForCausalLM.from_pretrained(write_llama(Path("gpt2")))
        lod.save_pretrained(lod.decompose(llama, ranks=0.5), "small")
        return {"loader": [{"input_ids": ids, "labels": ids}] * 2}
    if page == "pretrained":
        from transformers import AutoModelForCausalLM

        from maestro_lod.integrations.huggingface import save_pretrained

        llama = AutoModelForCausalLM.from_pretrained(write_llama(Path("llama")))
        if "model.layers" in block:
            return {"model": llama, "batches": [{"input_ids": torch.arange(16).view(2, 8)}]}
        save_pretrained(lod.decompose(llama), "small")
        compressed = lod.decompose(network(), ranks=4) if "lod.distill(" in block else model
        return {"model": compressed, "original": model, "batches": [x, x + 1], "lod": lod}
    if page == "tuning":
        decomposed = lod.decompose(model)
        return {
            "lod": lod, "torch": torch, "F": functional, "build": network,
            "model": decomposed, "optimizer": torch.optim.SGD(decomposed.parameters(), lr=0.1),
            "x": x, "y": torch.zeros(8, dtype=torch.int64),
            "train_epoch": lambda model, penalty: (0.99, 9_000, 9_000, 1.0),
        }  # fmt: skip
    return {}


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_from_its_beginning_to_its_end(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    for place, block in enumerate(code_of(page)):
        block = textwrap.dedent(block).replace('"cifar10"', '"digits"').replace("=500", "=5")
        block = block.replace("range(22)", "range(2)")  # layers
        code = compile(block, f"{page}.md, block {place + 1}", "exec")
        if FLOWER not in block:  # which is in an environment of its own, see test_flower.py
            names |= given_to(page, block)
            exec(code, names)
    lod.show_progress(None)
    if page == "quickstart":
        done = names["done"]
        assert done.history[-1].relative_params <= 0.25
        assert done.history[-1].validation["accuracy"] > 0.9


def test_pages_that_are_run_elsewhere_are_named_there() -> None:
    for page, tests in ELSEWHERE.items():
        assert code_of(page), page
        for name in re.findall(r"test_\w+\.py", tests):
            assert [*(ROOT / "tests").rglob(name)], name


@pytest.mark.parametrize("document", DOCS, ids=PAGES)
def test_every_link_of_a_page_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_every_page_has_its_place_in_the_menu() -> None:
    code = ast.parse((ROOT / "docs" / "site.py").read_text(encoding="utf-8"))
    (order,) = (
        node.value
        for node in code.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER"
    )
    named = {page for pages in ast.literal_eval(order).values() for page in pages}
    assert {*PAGES} <= named


IMPORTS = re.compile(r"(?:from|import) (maestro_lod[\w.]*)|\b(maestro_lod(?:\.[a-z_]+)+)\.\w+")


def test_no_page_or_example_imports_deeper_than_the_top_level() -> None:
    pages = [ROOT / "README.md", *DOCS, *(ROOT / "examples").rglob("*.*")]
    for page in (path for path in pages if path.suffix in (".md", ".py", ".ipynb")):
        text = re.sub(r"(?m)^::: .*$", "", page.read_text(encoding="utf-8"))
        for imported, used in IMPORTS.findall(text):
            room = (imported or used).removeprefix("maestro_lod").strip(".").split(".")
            assert room == [""] or (room[0] == "integrations" and len(room) <= 2), page


def test_every_public_name_is_in_the_reference_with_an_example() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    described = {
        place.rpartition(".")[2] for place in re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    }
    assert described == {*lod.__all__}
    examples = "".join(code_of("api"))
    for name in lod.__all__:
        assert f"lod.{name}" in examples, name


def test_every_public_name_in_an_example_of_a_docstring_exists() -> None:
    lines = [
        line.strip()
        for file in (ROOT / "src").rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    examples = [line for line in lines if line.startswith((">>> ", "... "))]
    named = {name for line in examples for name in re.findall(r"\blod\.(\w+)", line)}
    assert named
    assert {name for name in named if not hasattr(lod, name)} == set()


def test_no_page_says_that_live_wrappers_are_refused() -> None:
    for page in DOCS:
        text = re.sub(r"`tests/[^`]*`", "", page.read_text(encoding="utf-8"))  # names of tests
        for line in text.splitlines():
            assert not ("live" in line and "DDP" in line and "refused" in line), page


def test_what_every_command_says_is_shown_without_colours() -> None:
    shown = (ROOT / "docs" / "output.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"\n$ lod {command} " in shown or f"\n$ lod {command}\n" in shown, command
    assert "\x1b" not in shown and "Traceback" not in shown
