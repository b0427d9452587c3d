"""How large is the house? Lines, files, functions, classes, names, and tests of a layer's kind.

    python benchmarks/house.py [src/maestro_lod] [--list]

Everything is read from the sources. A test of a layer's kind is an `isinstance`, `issubclass`, a
comparison of `type(…)` or a dispatch on the annotation of an argument, of one of torch's layers
with weight matrices or of one of ours, outside `layers/`.
"""

from __future__ import annotations

import argparse
import ast
import collections
from collections.abc import Iterator, Mapping
from pathlib import Path

import maestro_lod

BARS = {
    "lines of the library": 7500,
    "files > 300 lines": 6,
    "functions > 40 lines": 4,
    "classes > 250 lines": 0,
    "class names that exist twice": 0,
    "public names": 25,
    "arguments of LoD": 12,
    "arguments of fit": 12,
    "tests of a layer's kind": 5,
}
KINDS = {
    *("Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "_ConvNd", "ConvTranspose1d"),
    *("ConvTranspose2d", "ConvTranspose3d", "Conv1D", "Embedding", "EmbeddingBag"),
    *("MultiheadAttention", "RNNBase", "RNN", "LSTM", "GRU", "Transformer"),
    *("TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoderLayer"),
}
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name, '' for anything else."""
    return getattr(node, "attr", getattr(node, "id", ""))


def kinds_of(node: ast.expr, kinds: set[str]) -> set[str]:
    """Return the kinds of layers that an expression names."""
    return {name_of(part) for part in ast.walk(node) if isinstance(part, ast.expr)} & kinds


def own_kinds(layers: Path) -> set[str]:
    """Return the classes of our layers, their common base left out."""
    trees = (ast.parse(path.read_text()) for path in layers.glob("*.py"))
    found = {
        node.name: {name_of(base) for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    modules = {"Module", "LowRank"}
    while more := {n for n, bases in found.items() if bases & modules} - modules:
        modules |= more
    return modules - {"Module", "LowRank", "Factors"}


def kind_tests(tree: ast.AST, kinds: set[str]) -> Iterator[int]:
    """Yield the lines on which the kind of a layer is tested."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in ("isinstance", "issubclass"):
            if len(node.args) == 2 and kinds_of(node.args[1], kinds):
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            asks = any(isinstance(s, ast.Call) and name_of(s.func) == "type" for s in sides)
            if asks and any(kinds_of(side, kinds) for side in sides):
                yield node.lineno
        elif isinstance(node, Functions) and node.decorator_list:
            dispatches = any(name_of(d) == "register" for d in node.decorator_list)
            first = next(iter(node.args.args), None)
            if dispatches and first and first.annotation and kinds_of(first.annotation, kinds):
                yield node.lineno


def arguments(tree: ast.AST, function: str, of: str | None = None) -> int | None:
    """Count the arguments of a function, or of a method without its `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef if of else Functions) and node.name == (of or function):
            if of is None:
                return len(node.args.args) + len(node.args.kwonlyargs)
            inner = next(n for n in node.body if isinstance(n, Functions) and n.name == function)
            return len(inner.args.args) + len(inner.args.kwonlyargs) - 1
    return None


def measured(source: Path) -> tuple[dict[str, int], dict[str, list[str]], dict[str, int]]:
    """Return the figures, what they consist of, and the lines of each room."""
    kinds = KINDS | own_kinds(source / "layers")
    found: dict[str, list[str]] = collections.defaultdict(list)
    rooms: dict[str, int] = collections.Counter()
    classes: dict[str, list[str]] = collections.defaultdict(list)
    counts: dict[str, int] = {}
    for path in sorted(source.rglob("*.py")):
        text, place = path.read_text(), path.relative_to(source)
        tree, lines = ast.parse(text), len(text.splitlines())
        rooms[place.parts[0] if len(place.parts) > 1 else "single files"] += lines
        if lines > 300:
            found["files > 300 lines"].append(f"{place} {lines}")
        for node in ast.walk(tree):
            if not isinstance(node, (*Functions, ast.ClassDef)):
                continue
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(place))
                if size > 250:
                    found["classes > 250 lines"].append(f"{place} {node.name} {size}")
            elif size > 40:
                found["functions > 40 lines"].append(f"{place} {node.name} {size}")
        if place.parts[0] != "layers":
            tests = kind_tests(tree, kinds)
            found["tests of a layer's kind"] += [f"{place}:{line}" for line in sorted(tests)]
        if place.as_posix() == "train/lod.py":
            counts["arguments of LoD"] = arguments(tree, "__init__", "LoD") or 0
        if place.as_posix() == "train/fit.py":
            counts["arguments of fit"] = arguments(tree, "fit") or 0
    found["class names that exist twice"] = [
        f"{name}: {', '.join(places)}" for name, places in classes.items() if len(places) > 1
    ]
    found["public names"] = list(maestro_lod.__all__)
    counts["lines of src"] = sum(rooms.values())
    counts["lines of the library"] = counts["lines of src"] - rooms["app"]
    counts |= {key: len(found[key]) for key in BARS if key not in counts}
    return counts, found, dict(rooms)


def show(counts: Mapping[str, int], found: Mapping[str, list[str]], *, listed: bool) -> None:
    print(f"{'':30s}{'now':>8s}{'bar':>8s}")
    for key in ("lines of src", *BARS):
        bar = BARS.get(key)
        missed = "  missed" if bar is not None and counts[key] > bar else ""
        print(f"{key:30s}{counts[key]:8,}{'' if bar is None else f'{bar:,}':>8s}{missed}")
        for entry in found.get(key, ()) if listed and key != "public names" else ():
            print(f"    {entry}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(maestro_lod.__file__).parent
    parser.add_argument("source", nargs="?", type=Path, default=here)
    parser.add_argument("--list", action="store_true", help="say what the figures consist of")
    options = parser.parse_args()
    counts, found, rooms = measured(options.source)
    show(counts, found, listed=options.list)
    print("\nlines by room")
    for room, lines in sorted(rooms.items(), key=lambda entry: -entry[1]):
        print(f"{room:30s}{lines:8,}")


if __name__ == "__main__":
    main()
