"""Signals and errors that end a training, with the command that resumes it."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from maestro_lod.cli.display import Display
from maestro_lod.cli.recipe import Recipe
from maestro_lod.cli.run import Interrupted
from maestro_lod.cli.setup import user_function_names
from maestro_lod.cli.terminal import complain, say
from maestro_lod.cli.torchrun import is_main_process
from maestro_lod.cli.user_code import UserCodeError
from maestro_lod.errors import MaestroError, TrainingError, listed


@contextmanager
def stoppable(
    display: Display, recipe: Recipe, again: str, saved: Callable[[], bool]
) -> Iterator[list[int]]:
    """Let signals stop a training; whatever ends it, print the command that resumes it."""
    with _stop_on_signal(lambda: display.begun) as asked:
        try:
            with _warnings_in_a_line():
                yield asked
        except Interrupted:
            display.close()
            if is_main_process():
                say(f"stopped; everything is saved. Resume with: {again}")
            number = asked[0] if asked else signal.SIGTERM  # the signal went to another process
            raise typer.Exit(128 + number) from None
        except KeyboardInterrupt:
            display.close()
            hint = f" Resume from the last checkpoint with: {again}" if saved() else ""
            raise typer.Exit(complain(f"interrupted.{hint}", 130)) from None
        except TrainingError as error:
            display.close()
            # here, where signals are handled: torchrun sends one to all when a process has ended
            raise typer.Exit(complain(error, 1)) from error
        except MaestroError:
            raise
        except Exception as error:
            if not (names := user_function_names(recipe)):
                raise
            raise UserCodeError(
                f"{type(error).__name__}: {error}. This recipe runs your own {listed(names)}: the "
                f"traceback above shows where it failed. Fix it, then resume with: {again}"
            ) from error
        finally:
            display.close()


@contextmanager
def _stop_on_signal(begun: Callable[[], bool]) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that a run can save its state and stop.

    Before the run has begun, and the second time, a signal stops it at once.
    """
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if asked or not begun():
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings as one line, without their place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        complain(f"note: {message}", 0)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
