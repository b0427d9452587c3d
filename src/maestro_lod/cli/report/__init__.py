"""Report: training runs as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maestro_lod.cli.report.page import page
from maestro_lod.cli.report.runs import read_runs
from maestro_lod.errors import CheckpointError
from maestro_lod.files.atomic import replacing, writing

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write a self-contained HTML page about one or several runs, finished or not.

    Args:
        runs: Run directories.
        out: Path of the page; in a directory, `report.html`.

    Returns:
        The path of the page.

    Raises:
        CheckpointError: If a file of a run is damaged, or the page cannot be written.
        OptionError: If `runs` is empty.

    Example:
        >>> write_report([Path("runs/digits")], Path("report.html"))
    """
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    # names from files may contain surrogates, which UTF-8 cannot encode
    content = page(read_runs(runs)).encode("utf-8", errors="xmlcharrefreplace")
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as place:
                place.write_bytes(content)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Give another path for the page.") from error
    return out
