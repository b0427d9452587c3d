"""Reproduction of the paper: list items, measure them, write the README from the results.

python -m paper                     list all items and their state
python -m paper toy counts          measure these items; finished trainings are reused
python -m paper table10 --smoke     a smoke test: one seed, one epoch, few samples
python -m paper readme              write README.md, figures and pages from the results
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from maestro_lod.cli.memory import keep_freed_memory
from maestro_lod.errors import MaestroError, suggest
from paper.record import RESULTS, ROOT, read, write
from paper.scale import Scale

ITEMS = (
    "toy", "table10", "swings", "dynamics", "sizes", "ablation", "counts", "cifar", "multi30k",
    "times", "budgets", "sampling", "compare", "compare_cifar",
    "compare_digits", "every-size", "every-size-whole",
)  # fmt: skip
"""Items in the order of the README."""


START, END = "<!-- python -m paper readme -->\n", "<!-- end of it -->"
"""Marks around the summary in docs/measured.md."""


def item(name: str) -> ModuleType:
    return import_module(f"paper.{name.replace('-', '_')}")


def measure(name: str, scale: Scale, results: Path) -> None:
    """Measure one item and write its result, figures and pages."""
    start = time.monotonic()
    module = item(name)
    result = module.measure(scale)
    write(name, result, time.monotonic() - start, results)
    draw(module, result, results)


def draw(module: ModuleType, result: dict[str, Any], results: Path) -> None:
    """Write the figures and pages of an item from its result."""
    for figure, drawing in module.figures(result).items():
        (results / f"{figure}.svg").write_text(drawing)
    for page, content in pages(module, result).items():
        (results / f"{page}.html").write_text(content)


def pages(module: ModuleType, result: dict[str, Any]) -> dict[str, str]:
    """Return the HTML pages of an item by name."""
    made: dict[str, str] = module.pages(result) if hasattr(module, "pages") else {}
    return made


def readme(results: Path = RESULTS) -> str:
    """Return the README that follows from the results."""
    parts = [(ROOT / "preface.md").read_text()]
    for name in ITEMS:
        record, module = read(name, results), item(name)
        parts.append(f"## {module.TITLE}\n\n`python -m paper {name}`")
        if record is None:
            parts.append("Not measured yet.")
            continue
        figures = module.figures(record["result"])
        parts.append(module.markdown(record["result"]))
        parts += [f"![{figure}](results/{figure}.svg)" for figure in figures]
        parts.append(f"<sub>commit {record['commit']}, {record['seconds'] / 60:.1f} minutes</sub>")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def summary(results: Path = RESULTS) -> str:
    """Return the summary for docs/measured.md: the outcome of each item, and Table 10."""
    lines = ["| item | outcome |", "|---|---|"]
    for name in ITEMS:
        record, module = read(name, results), item(name)
        outcome = module.judgement(record["result"]) if record else "not measured yet"
        lines.append(f"| {module.TITLE} | {outcome} |")
    if record := read("table10", results):
        lines += ["", item("table10").markdown(record["result"])]
    return "\n".join(lines) + "\n"


def write_readmes(results: Path) -> None:
    """Write the README here, all figures and pages, and the summary in docs/measured.md."""
    for name in ITEMS:
        if record := read(name, results):
            draw(item(name), record["result"], results)
    (ROOT / "README.md").write_text(readme(results))
    main_readme = ROOT.parent / "docs" / "measured.md"
    head, rest = main_readme.read_text().split(START)
    main_readme.write_text(head + START + summary(results) + END + rest.split(END, 1)[1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paper", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("items", nargs="*", help="items, all, or readme")
    parser.add_argument("--smoke", action="store_true", help="one seed, one epoch, few samples")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="training runs")
    parser.add_argument("--results", type=Path, help="where results go")
    options = parser.parse_args(arguments)
    if options.smoke and options.results is None:
        parser.error(
            "--smoke needs --results DIR, which keeps its numbers apart from measured ones"
        )
    results = options.results or RESULTS
    for name in options.items:
        if name not in (*ITEMS, "all", "readme"):
            parser.error(
                f"item {name!r} is unknown.{suggest(name, ITEMS)} Known: {', '.join(ITEMS)}."
            )
    if not options.items:
        for name in ITEMS:
            state = "measured" if read(name, results) else "not measured"
            print(f"{name:12}{item(name).TITLE:80}{state}")
        return
    keep_freed_memory()
    torch.set_num_threads(1)
    names = ITEMS if "all" in options.items else [n for n in options.items if n != "readme"]
    for name in names:
        print(f"{name}: {item(name).TITLE}", file=sys.stderr)
        try:
            measure(name, Scale(options.runs, options.smoke), results)
        except MaestroError as error:
            sys.exit(f"{name}: {error}")
    if not options.smoke:
        write_readmes(results)


if __name__ == "__main__":
    main()
