"""Count what is promised in docs/reliability.md, and write the counts into it.

python benchmarks/reliability.py damage     10,000 flipped bits, 2,000 damaged files
python benchmarks/reliability.py locks      50 pairs of trainings, 50 killed holders of a lock
python benchmarks/reliability.py lines      500 command lines
python benchmarks/reliability.py hostile    every command on directories and files of others
python benchmarks/reliability.py docs       the tables, from these, soak, verification, zeros, …
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from interleaved import RESULTS, write

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "reliability.md"
START, END = "<!-- benchmarks/reliability.py {} -->\n", "<!-- end {} -->\n"
AS_PROMISED = {
    "two_trainings": ("two trainings at once in one directory", "one went on, the other was told"),
    "killed_with_workers": ("SIGKILL of one whose loader workers live on", "went on at once"),
}
FAULTS = {"flipped bits": "one flipped bit", "damaged files": "a damaged file"}


# -- counting --------------------------------------------------------------------------------------


def told_by(test: str, *counts: str) -> dict[str, Any]:
    """Run a test file as a script and return the JSON that it ends with, on either stream."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / test), *counts],
            cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    said = done.stdout if done.stdout.startswith("{") else done.stderr
    ends: dict[str, Any] = json.loads(said.splitlines()[-1])
    return ends


# -- tables ----------------------------------------------------------------------------------------


def record(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return told


def where(told: dict[str, Any]) -> str:
    machine = told["machine"]
    return f"commit {told['commit']}, torch {machine['torch']}, Python {machine['python']}"


def counts() -> str:
    """Return the table of what was tried and what failed, by kind."""
    damage, locks, soak, lines_tried = map(record, ("damage", "locks", "soak", "lines"))
    rows = []
    for what, title in FAULTS.items():
        for kind, ends in damage["answer"][what].items():
            silent = ends.get("silently something else", 0)
            rows.append((f"{title}, {kind}", sum(ends.values()), silent))
    for name, (title, promised) in AS_PROMISED.items():
        ends = locks["answer"][name]
        rows.append((title, sum(ends.values()), sum(ends.values()) - ends.get(promised, 0)))
    found = soak["answer"]
    for what, kills in sorted(found["kills"].items()):
        kind = "train" if what == "resume" else what
        failed = sum(failure["kind"] == kind for failure in found["failures"])
        rows.append((f"SIGKILL of {what}", kills, failed))
    rows.append(("any command line", sum(lines_tried["answer"].values()), 0))  # one would end it
    lines = ["| what was tried | times | failed |", "|---|--:|--:|"]
    lines += [f"| {title} | {tried:,} | {failed:,} |" for title, tried, failed in rows]
    lives, kills = sum(found["lives"].values()), sum(found["kills"].values())
    return "\n".join(
        [*lines, "", f"Kills: {kills:,} in {lives:,} lives ({where(soak)}). "
         f"Damage: {where(damage)}. Locks: {where(locks)}. "
         f"Command lines: {where(lines_tried)}."]
    ) + "\n"  # fmt: skip


def costs() -> str:
    """Return the table of what verification takes."""
    told = record("verification")
    kinds = ("into memory at hand", "plain read", "not verified", "verified")
    added = "added over a plain read"
    lines = [
        f"| seconds, processor / clock | {' | '.join((*kinds, added))} |",
        "|---|" + "--:|" * 5,
    ]
    for name, row in told["answer"]["seconds"].items():
        cells = [f"{row[kind]['cpu']:.3f} / {row[kind]['wall']:.3f}" for kind in kinds]
        cells.append(f"{row[added]['cpu']:.2f} / {row[added]['wall']:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    size = told["answer"]["bytes"] / 1e6
    return "\n".join([*lines, "", f"({size:.0f} MB; {where(told)}.)"]) + "\n"


def findings() -> str:
    """Return the table of faults that were found: how each ends on the code before, and on this."""
    told = record("findings")
    lines = ["| finding | what was wrong | before | after | test |", "|--:|---|---|---|---|"]
    for row in told["answer"]["rows"]:
        cells = (row["title"], row["before"], row["after"], f"`{row['test']}`")
        lines.append(f"| {row['finding']} | {' | '.join(cells)} |")
    before, now = told["answer"]["before"], {row["commit"] for row in told["answer"]["rows"]}
    commits = f"Before: commit {before}. After: commits {', '.join(sorted(now))}"
    return "\n".join([*lines, "", f"({commits}.)"]) + "\n"


def zeros() -> str:
    """Return the table of how layers that begin as zeros learn, beside dense ones."""
    told = record("zeros")
    lines = [
        "| layer | begins as | optimizer, warm-up | dense | LoD | difference |",
        "|---|---|---|--:|--:|--:|",
    ]
    for row in told["answer"]["rows"]:
        how = f"{row['optimizer']}, {row['warm-up']}"
        cells = (f"{row['dense']:.2f} ± {row['between seeds']:.2f}", f"{row['lod']:.2f}")
        lines.append(
            f"| {row['layer']} | {row['begin']} | {how} | {' | '.join(cells)} | "
            f"{row['difference']:+.2f} ± {row['error']:.2f} |"
        )
    commits = ", ".join(sorted({row["commit"] for row in told["answer"]["rows"]}))
    return "\n".join([*lines, "", f"(Commits {commits}.)"]) + "\n"


TABLES = {"counts": counts, "costs": costs, "zeros": zeros, "findings": findings}


def documented(text: str) -> str:
    """Return the docs with the tables as they follow from the results."""
    for name, table in TABLES.items():
        head, rest = text.split(START.format(name))
        end = END.format(name)
        text = head + START.format(name) + table() + end + rest.split(end, 1)[1]
    return text


def main() -> None:
    for what in sys.argv[1:] or ["damage", "locks", "lines", "docs"]:
        if what == "damage":
            write("damage", told_by("test_digests.py", "10000", "2000"))
        elif what == "locks":
            write("locks", told_by("test_locks.py", "50"))
        elif what == "lines":
            write("lines", told_by("test_command_lines.py", "500"))
        elif what == "hostile":
            write("hostile", told_by("test_hostile.py"))
        elif what == "docs":
            DOCS.write_text(documented(DOCS.read_text()))
        else:
            sys.exit(f"{what!r} is none of damage, locks, lines, docs.")


if __name__ == "__main__":
    main()
