"""`lod …`: thin, strict, typed; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Any

try:
    import typer

    from maestro_lod.app.commands import comparing, results, training
    from maestro_lod.app.own import OwnCodeError
    from maestro_lod.app.terminal import complain
except ImportError as missing:  # the core works without what the program needs
    sys.exit(f"lod needs more than the library itself ({missing}): pip install 'maestro-lod[cli]'")

from maestro_lod.app.memory import keep_freed_memory
from maestro_lod.errors import CheckpointError, MaestroError, TrainingError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a model once, low-rank with ordered ranks, and get every size out.",
    epilog="Start with: [bold]lod train digits[/bold]",
)

# what does not fit is said in one line; torch would log a page about it before
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

# typer brings its own click, or uses the installed one: take the class from where typer has it
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app.command(epilog=training.settings_help())(training.train)
for _command in (
    training.resume,
    training.tune,
    comparing.compare,
    results.report,
    results.summary,
    results.recipes,
    results.frontier,
    results.deploy,
    results.bench,
    results.verify,
):
    app.command()(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the program; ends with exit code 0, 1 (failed), 2 (wrong input) or 130 (interrupted)."""
    keep_freed_memory()
    try:
        code = app(args=arguments, prog_name="lod", standalone_mode=False) or 0
    except OwnCodeError as error:
        traceback.print_exception(error.__cause__)  # theirs to read
        code = complain(error, 1)
    except (TrainingError, CheckpointError) as error:
        code = complain(error, 1)
    except MaestroError as error:
        code = complain(error, 2)
    except _UsageError as error:
        message = error.format_message()  # empty where the help was shown instead
        end = "" if message.endswith((".", "?")) else "."
        code = complain(f"{message}{end} See: lod --help", 2) if message else 2
    except (KeyboardInterrupt, typer.Abort):
        code = complain("interrupted.", 130)
    except BrokenPipeError:  # `lod … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = complain(f"{error.filename or 'cannot go on'}: {error.strerror or error}.", 1)
    except Exception:
        traceback.print_exc()
        code = complain("this is a fault of lod, not yours; please report it with the above.", 1)
    sys.exit(code)


if __name__ == "__main__":
    main()
