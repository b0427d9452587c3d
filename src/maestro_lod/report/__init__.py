"""Numbers of training runs, as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maestro_lod.errors import CheckpointError
from maestro_lod.report.page import page
from maestro_lod.report.runs import read_runs

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained HTML page about one or several run directories; return its path.

    Runs may be unfinished. If `out` is a directory, the page is `report.html` in it.
    """
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    content = page(read_runs(runs))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # names from files may hold halves of characters, which UTF-8 cannot write
        out.write_bytes(content.encode("utf-8", errors="xmlcharrefreplace"))
    except OSError as error:
        raise CheckpointError(
            f"cannot write {out} ({error.strerror}). Give another place for the page."
        ) from error
    return out
