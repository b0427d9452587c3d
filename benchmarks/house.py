"""How large is the house? Lines, files, functions, classes, names, and tests of a layer's kind.

    python benchmarks/house.py [--list]                  the figures, and what they consist of
    python benchmarks/house.py --contract                imports against the order of the rooms
    python benchmarks/house.py --walks                   how far single calls go
    python benchmarks/house.py --write NAME [--commit COMMIT]   all of it as JSON

Everything is read from the sources. A test of a layer's kind is an `isinstance`, `issubclass`, a
comparison of `type(…)` or a dispatch on the annotation of an argument, of one of torch's layers
with weight matrices or of one of ours, outside `layers/`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import maestro_lod

UPWARD = "imports against the rooms"
TYPES_UPWARD = "the same, for types alone"
COUNTED = (
    *(UPWARD, TYPES_UPWARD, "files > 300 lines", "functions > 40 lines"),
    *("classes > 250 lines", "class names that exist twice", "public names", "arguments of LoD"),
    *("arguments of fit", "tests of a layer's kind"),
)
ROOMS = (
    *("base", "layers", "distributed", "files", "model", "sizes", "train", "pretrained"),
    *("deploy", "integrations", "cli", "baselines", "public"),
)
"""In this order: a file imports from its own room and from those before it."""

PLACES = {
    **dict.fromkeys(("errors", "progress", "text", "version"), "base"),
    "__init__": "public",
    "__main__": "cli",
    # where the files were before there were rooms, for the figures of old commits
    **dict.fromkeys(("amounts", "installing", "markup", "plot", "shown", "table"), "base"),
    **dict.fromkeys(("calls", "checkpoint", "contents", "cost", "counting"), "model"),
    **dict.fromkeys(("deploy/limits", "deploy/points", "handover", "obstacles"), "model"),
    **dict.fromkeys(("planning", "reading", "structure", "surgery"), "model"),
    **dict.fromkeys(("digests", "files", "json_files", "pretrained/kept", "state"), "files"),
    **dict.fromkeys(("distributed/shard_files", "tensors"), "files"),
    **dict.fromkeys(("app", "methods/__init__"), "cli"),
    **dict.fromkeys(("distributed/batches", "methods/dense", "methods/lod"), "train"),
    "methods/sizes": "train",
    **dict.fromkeys(
        (f"app/models/{name}" for name in ("resnet", "transformer", "vgg")), "baselines"
    ),
    **dict.fromkeys(("app/compare", "integrations/torch_pruning", "methods"), "baselines"),
    **dict.fromkeys(("deploy/choice", "deploy/frontier", "deploy/journal"), "sizes"),
    **dict.fromkeys(("deploy/latency", "deploy/measured", "deploy/replay"), "sizes"),
    **dict.fromkeys(("deploy/search", "deploy/timing", "pretrained/allocation"), "sizes"),
    **dict.fromkeys(("pretrained/calibration", "pretrained/observer"), "sizes"),
    **dict.fromkeys(("pretrained/outputs", "pretrained/whitening"), "sizes"),
    **dict.fromkeys(("train/allocation", "train/averages", "train/order"), "sizes"),
    **dict.fromkeys(("federated", "pretrained/directory"), "integrations"),
}
"""The room of a file or folder that is not called like its room; the longest path counts."""

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


class Import(NamedTuple):
    """One file that imports another."""

    importer: str
    imported: str
    line: int
    types_only: bool

    def __str__(self) -> str:
        rooms = f"{room_of(self.importer)} → {room_of(self.imported)}"
        return f"{self.importer}:{self.line} → {self.imported} ({rooms})"


def room_of(place: str) -> str | None:
    """Return the room of a file, given by its path below the library; None if it has none."""
    parts = place.removesuffix(".py").split("/")
    for length in range(len(parts), 0, -1):
        if room := PLACES.get("/".join(parts[:length])):
            return room
    return parts[0] if parts[0] in ROOMS else None


def imports_of(source: Path) -> Iterator[Import]:
    """Yield every import of one file of the library by another."""
    files = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}

    def file_of(module: str) -> str | None:
        path = "/".join(module.split(".")[1:])
        places = (f"{path}.py", f"{path}/__init__.py".lstrip("/"))
        return next((place for place in places if place in files), None)

    def modules_of(node: ast.AST, package: str) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if file_of(inner) else module

    for place in sorted(files):
        tree = ast.parse((source / place).read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        package = ".".join(("maestro_lod", *place.split("/")[:-1]))
        for node in ast.walk(tree):
            modules = {m for m in modules_of(node, package) if m.split(".")[0] == "maestro_lod"}
            for other in {file_of(module) for module in modules} - {None, place}:
                assert other is not None
                yield Import(place, other, node.lineno, id(node) in for_types)  # type: ignore[attr-defined]


def upward(imports: Iterator[Import]) -> list[Import]:
    """Return the imports against the order of the rooms, each pair of files once."""
    found: dict[tuple[str, str], Import] = {}
    for one in sorted(imports, key=lambda entry: (entry.importer, entry.types_only, entry.line)):
        rooms = [room_of(place) for place in (one.importer, one.imported)]
        known = all(room in ROOMS for room in rooms)
        if not known or ROOMS.index(rooms[0] or "") < ROOMS.index(rooms[1] or ""):
            found.setdefault((one.importer, one.imported), one)
    return [*found.values()]


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
    for one in upward(imports_of(source)):
        found[TYPES_UPWARD if one.types_only else UPWARD].append(str(one))
    counts["lines of src"] = sum(rooms.values())
    counts |= {key: len(found[key]) for key in COUNTED if key not in counts}
    return counts, found, dict(rooms)


def show(counts: Mapping[str, int], found: Mapping[str, list[str]], *, listed: bool) -> None:
    for key in ("lines of src", *COUNTED):
        print(f"{key:30s}{counts[key]:8,}")
        for entry in found.get(key, ()) if listed and key != "public names" else ():
            print(f"    {entry}")


def show_contract(source: Path) -> int:
    """List the imports against the order of the rooms, and return how many there are."""
    wrong = upward(imports_of(source))
    for types_only in (False, True):
        those = [one for one in wrong if one.types_only is types_only]
        print(f"{TYPES_UPWARD if types_only else UPWARD}: {len(those)}")
        for one in those:
            print(f"    {one}")
    return len(wrong)


def show_walks(walks: Mapping[str, Mapping[str, int]], imported: Mapping[str, int]) -> None:
    columns = next(iter(walks.values()))
    print(f"{'':36s}" + "".join(f"{column:>11s}" for column in columns))
    for name, counts in walks.items():
        print(f"{name:36s}" + "".join(f"{count:11,}" for count in counts.values()))
    print("\nmodules imported by a command")
    for name, count in imported.items():
        print(f"{name:36s}{count:11,}")


def everything(source: Path) -> dict[str, Any]:
    """Return all that can be counted, for JSON."""
    from house_walks import imported, walks

    counts, found, rooms = measured(source)
    files = [path.relative_to(source).as_posix() for path in source.rglob("*.py")]
    by_room = collections.Counter(room_of(place) or "without a room" for place in files)
    return {
        "figures": counts | {"files": len(files)},
        "upward imports": {key: found[key] for key in (UPWARD, TYPES_UPWARD)},
        "lines by folder": rooms,
        "files by room": dict(by_room),
        "walks": walks(),
        "modules imported": imported(),
    }


def of_commit(commit: str) -> dict[str, Any]:
    """Return the same for the library as it is at a commit, in a process of its own."""
    from same_losses import checked_out

    with tempfile.TemporaryDirectory() as folder:
        source = checked_out(commit, Path(folder))
        command = [sys.executable, __file__, str(source / "maestro_lod"), "--json"]
        paths = os.pathsep.join((str(source), str(Path(__file__).parent)))
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(maestro_lod.__file__).parent
    parser.add_argument("source", nargs="?", type=Path, default=here)
    parser.add_argument("--list", action="store_true", help="list what the figures consist of")
    parser.add_argument("--contract", action="store_true", help="list imports against the rooms")
    parser.add_argument("--walks", action="store_true", help="count how far single calls go")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--write", metavar="NAME", help="write everything to results/NAME.json")
    parser.add_argument("--commit", help="with --write: measure the library at a commit")
    options = parser.parse_args()
    if options.contract:
        sys.exit(1 if show_contract(options.source) else 0)
    if options.walks:
        from house_walks import imported, walks

        show_walks(walks(), imported())
    elif options.json:
        print(json.dumps(everything(options.source)))
    elif options.write:
        from interleaved import write

        found = of_commit(options.commit) if options.commit else everything(options.source)
        write(options.write, {"of": options.commit or "the working tree", **found})
    else:
        counts, found, rooms = measured(options.source)
        show(counts, found, listed=options.list)
        print("\nlines by folder")
        for room, lines in sorted(rooms.items(), key=lambda entry: -entry[1]):
            print(f"{room:30s}{lines:8,}")


if __name__ == "__main__":
    main()
