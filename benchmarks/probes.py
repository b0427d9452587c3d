"""What probes of `findings.py` are made of: each the smallest program that shows a fault."""

from __future__ import annotations

from collections.abc import Callable

PROBES: dict[str, tuple[str, str, Callable[[], object]]] = {}
"""What is wrong, in the order of the findings → finding, test, probe."""


class Fault(Exception):
    """What was found is still there."""


def probe(finding: int, title: str, test: str) -> Callable[[Callable[[], object]], None]:
    def noted(run: Callable[[], object]) -> None:
        PROBES[title] = (str(finding), test, run)

    return noted


def refuses(work: Callable[[], object]) -> None:
    """Expect an error of the library's own."""
    from maestro_lod import MaestroError

    try:
        work()
    except MaestroError:
        return
    raise Fault("nothing is said")


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Fault(otherwise)


def works(work: Callable[[], object]) -> None:
    """Expect no error, of whatever kind."""
    try:
        work()
    except Exception as error:  # which one it is says nothing about whose fault it is
        raise Fault(f"refused with {type(error).__name__}") from error
