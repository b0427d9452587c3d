"""Numbers of training runs, as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maestro_lod.cli.report.page import page
from maestro_lod.cli.report.runs import read_runs
from maestro_lod.errors import CheckpointError
from maestro_lod.files.atomic import replacing, writing

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained HTML page about one or several run directories; return its path.

    Runs may be unfinished. If `out` is a directory, the page is `report.html` in it.
    """
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    # names from files may hold halves of characters, which UTF-8 cannot write
    content = page(read_runs(runs)).encode("utf-8", errors="xmlcharrefreplace")
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as place:
                place.write_bytes(content)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Give another place for the page.") from error
    return out
