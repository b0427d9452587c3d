"""How long do you wait for the first word of `lod`, now and before?

    python benchmarks/startup.py 3ab0e5b      # the commit to compare with

Time of the processor, on one thread, of `lod --help`, `lod recipes` and `lod summary RUN`, and of
`lod train` until its first line; medians of rounds in which both commits take turns. Nothing here
waits, so on an idle machine wall time is about the same.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from interleaved import write

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 7
QUICK = ["--set", "epochs=1", "--set", "data.limit=64", "--set", "threads=1"]


def call(source: Path, *arguments: str) -> list[str]:
    """Return the command that is `lod …` of a checkout, whichever module it has it in."""
    older = (source / "src/maestro_lod/app").exists()
    home = "maestro_lod.app.cli" if older else "maestro_lod.cli.main"
    run = (
        f"import sys; sys.path.insert(0, {str(source / 'src')!r}); from {home} import main; main()"
    )
    return [sys.executable, "-c", run, *arguments]


def _plain() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def cpu_of(command: list[str], place: Path) -> float:
    """Return the processor time that a command takes."""
    before = _children()
    subprocess.run(command, cwd=place, env=_plain(), check=True, capture_output=True)
    return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_until_first_line(command: list[str], place: Path) -> float:
    """Return the processor time that a command has taken when it says its first line (Linux)."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=place, env=_plain(), stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        # of the numbers behind "(name)", these are user and system time
        spent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        process.communicate()
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


def measure(sources: Mapping[str, Path], place: Path) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each command of each checkout, round by round."""
    for name, source in sources.items():
        train = call(source, "train", "digits", *QUICK, "--out", f"run-{name}")
        subprocess.run(train, cwd=place, check=True, capture_output=True, env=_plain())
    times: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS):
        for name, source in sources.items():
            asked = {
                "lod --help": ["--help"],
                "lod recipes": ["recipes"],
                "lod summary RUN": ["summary", f"run-{name}"],
            }
            for title, arguments in asked.items():
                took = cpu_of(call(source, *arguments), place)
                times.setdefault(title, {}).setdefault(name, []).append(took)
            train = call(source, "train", "digits", *QUICK, "--out", f"{name}-{number}")
            took = cpu_until_first_line(train, place)
            times.setdefault("lod train, first line", {}).setdefault(name, []).append(took)
    return times


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Give a folder that has a commit's files."""
    with tempfile.TemporaryDirectory() as place:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", f"{place}/at", commit], check=True)
        try:
            yield Path(place, "at")
        finally:
            subprocess.run([*git, "remove", "--force", f"{place}/at"], check=True)


def main() -> None:
    commit = sys.argv[1]
    with checkout(commit) as older, tempfile.TemporaryDirectory() as place:
        times = measure({commit: older, "now": ROOT}, Path(place))
    answer = {
        title: {name: round(statistics.median(rounds), 3) for name, rounds in of.items()}
        for title, of in times.items()
    }
    write("startup", {"seconds": answer, "rounds": ROUNDS})


if __name__ == "__main__":
    main()
