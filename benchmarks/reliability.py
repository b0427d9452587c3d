"""Count what is promised in docs/reliability.md, and write the counts into it.

python benchmarks/reliability.py damage     10,000 flipped bits, 2,000 damaged files
python benchmarks/reliability.py locks      50 pairs of trainings, 50 killed holders of a lock
python benchmarks/reliability.py lines      500 command lines
python benchmarks/reliability.py hostile    every command on directories and files of others
python benchmarks/reliability.py threads    answers of one model from eight threads
python benchmarks/reliability.py docs       the tables, from these, soak, verification, zeros, …
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from interleaved import RESULTS, write
from probes import FIRST, SECOND

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "reliability.md"
START, END = "<!-- benchmarks/reliability.py {} -->\n", "<!-- end {} -->\n"
AS_PROMISED = {
    "two_trainings": ("two trainings at once in one directory", "one went on, the other was told"),
    "killed_with_workers": ("SIGKILL of one whose loader workers live on", "went on at once"),
}
SOAKS = ("soak", "soak_commands")
FAULTS = {"flipped bits": "one flipped bit", "damaged files": "a damaged file"}


# -- counting --------------------------------------------------------------------------------------


def told_by(test: str, *counts: str) -> dict[str, Any]:
    """Run a module of tests as a script and return the JSON that it ends with, on either stream."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.{test}", *counts],
            cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
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
    damage, locks, lines_tried = map(record, ("damage", "locks", "lines"))
    hostile, threads = record("hostile"), record("threads")
    rows = []
    for what, title in FAULTS.items():
        for kind, ends in damage["answer"][what].items():
            silent = ends.get("silently something else", 0)
            rows.append((f"{title}, {kind}", sum(ends.values()), silent))
    for name, (title, promised) in AS_PROMISED.items():
        ends = locks["answer"][name]
        rows.append((title, sum(ends.values()), sum(ends.values()) - ends.get(promised, 0)))
    rows += killed()
    rows.append(("any command line", sum(lines_tried["answer"].values()), 0))  # one would end it
    for kind, ends in hostile["answer"].items():
        rows.append((f"commands on hostile {kind}", sum(ends.values()), ends.get("failed", 0)))
    rows.append(("answers from eight threads", threads["answer"]["answers"],
                 threads["answer"]["of a wrong size"]))  # fmt: skip
    lines = ["| what was tried | times | failed |", "|---|--:|--:|"]
    lines += [f"| {title} | {tried:,} | {failed:,} |" for title, tried, failed in rows]
    places = {"Damage": damage, "Locks": locks, "Command lines": lines_tried, "Hostile": hostile,
              "Threads": threads}  # fmt: skip
    kills = [
        f"Kills: {sum(told['answer']['kills'].values()):,} in "
        f"{sum(told['answer']['lives'].values()):,} lives, {where(told)}."
        for told in map(record, SOAKS)
    ]
    told = " ".join([*kills, *(f"{what}: {where(of)}." for what, of in places.items())])
    return "\n".join([*lines, "", told]) + "\n"


def killed() -> list[tuple[str, int, int]]:
    """Return how often each command was killed, and how often its end was another, in all soaks."""
    kills, failed = Counter[str](), Counter[str]()
    for found in (record(name)["answer"] for name in SOAKS):
        kills.update(found["kills"])
        failed.update(failure["kind"] for failure in found["failures"])
    return [
        (f"SIGKILL of {what}", count, failed["train" if what == "resume" else what])
        for what, count in sorted(kills.items())
    ]


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


def found_by_review() -> dict[str, list[dict[str, Any]]]:
    """Return the faults that were found, by the commit that was reviewed."""
    reviews: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(record("findings")["answer"]["rows"], key=lambda row: row["finding"]):
        reviews.setdefault(row["review"], []).append(row)
    return {review: reviews[review] for review in (FIRST, SECOND)}


def kinds() -> str:
    """Return how many faults of each kind were found, how many there are still, in the findings."""
    lines = ["| reviewed | kind | findings | programs that fail | fail now |",
             "|---|---|--:|--:|--:|"]  # fmt: skip
    for review, rows in found_by_review().items():
        for kind in dict.fromkeys(row["kind"] for row in rows):
            of = [row for row in rows if row["kind"] == kind]
            counts = (
                len({row["finding"] for row in of}),
                sum(row["before"] != "holds" for row in of),
                sum(row["after"] != "holds" for row in of),
            )
            lines.append(f"| {review} | {kind or 'all'} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def findings() -> str:
    """Return the tables of faults that were found: how each ends on the code before, and now."""
    lines = []
    for review, rows in found_by_review().items():
        lines += ["| finding | what was wrong | before | after | test |", "|--:|---|---|---|---|"]
        for row in rows:
            cells = (row["title"], row["before"], row["after"], f"`{row['test']}`")
            lines.append(f"| {row['finding']} | {' | '.join(cells)} |")
        now = ", ".join(sorted({row["commit"] for row in rows}))
        lines += ["", f"(Before: commit {review}. After: commits {now}.)", ""]
    return "\n".join(lines)


def zeros() -> str:
    """Return the table of layers that start at zero, low-rank and dense."""
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


TABLES = {"counts": counts, "costs": costs, "zeros": zeros, "kinds": kinds, "findings": findings}


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
            write("damage", told_by("files.test_digests", "10000", "2000"))
        elif what == "locks":
            write("locks", told_by("files.test_locks", "50"))
        elif what == "lines":
            write("lines", told_by("cli.test_command_lines", "500"))
        elif what == "hostile":
            write("hostile", told_by("cli.test_hostile"))
        elif what == "threads":
            write("threads", told_by("layers.test_ranks"))
        elif what == "docs":
            DOCS.write_text(documented(DOCS.read_text()))
        else:
            sys.exit(f"{what!r} is none of damage, locks, lines, hostile, threads, docs.")


if __name__ == "__main__":
    main()
