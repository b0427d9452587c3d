"""`lod …`: thin, strict, typed; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from typing import Annotated, Any

from maestro_lod.cli.memory import keep_freed_memory
from maestro_lod.errors import CheckpointError, MaestroError, TrainingError, suggest
from maestro_lod.text import install_command
from maestro_lod.version import __version__

try:
    import typer
    from typer.core import TyperCommand, TyperGroup

    from maestro_lod.cli.terminal import complain
    from maestro_lod.cli.user_code import OwnCodeError
except ImportError as missing:  # the core works without what the program needs
    sys.exit(f"lod needs more than the library itself ({missing}): {install_command('cli')}")

COMMANDS = {
    "train": (
        "cli.commands.training",
        "Train a recipe, and write model, metrics and report to a directory.",
    ),
    "resume": (
        "cli.commands.training",
        "Go on with a run that was stopped, killed or interrupted, exactly where it was.",
    ),
    "tune": (
        "cli.commands.training",
        "Search the λ that gives a model within limits: halve it until one is accurate enough.",
    ),
    "compare": (
        "baselines.compare.command",
        "Train ways to a smaller model on your task under the same terms, and say which is best.",
    ),
    "report": (
        "cli.commands.results",
        "Write one self-contained HTML page about one run, or several side by side.",
    ),
    "summary": (
        "cli.commands.results",
        "Print ranks, parameters and MACs of every layer, of a recipe's model or a finished run's.",
    ),
    "demo": (
        "cli.commands.demo",
        "Show it all in half a minute: train to a size, cut every size, deploy one, compare.",
    ),
    "recipes": ("cli.commands.listing", "List the recipes that come with the library."),
    "frontier": (
        "cli.commands.results",
        "Find the best submodel for every size, without training, and add them to the report.",
    ),
    "deploy": (
        "cli.commands.results",
        "Write a run's model, as it was trained or cut to a size, to files that were verified.",
    ),
    "bench": (
        "cli.commands.results",
        "Print latency, size and test accuracy of dense and deployed sizes.",
    ),
    "compress": (
        "cli.commands.compressing",
        "Cut a pretrained model to a limit, by data and without training.",
    ),
    "heal": (
        "cli.commands.compressing",
        "Train a compressed transformers model for some steps to say what the original says.",
    ),
    "verify": (
        "cli.commands.results",
        "Read every file and say whether it is as it was written; exit code 1 if one is not.",
    ),
}
"""The module of each command and what the command does: help imports none of them."""


class _Commands(TyperGroup):
    """The commands by name; a module is imported when its command is called, and torch with it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1], rich_markup_mode="rich")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name not in COMMANDS:
            ctx.fail(f"No such command {name!r}.{suggest(name, COMMANDS)}")
        return name, _loaded(name), rest


def _loaded(name: str) -> Any:
    """Import a command."""
    module = importlib.import_module(f"maestro_lod.{COMMANDS[name][0]}")
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    epilog = module.settings_help() if name == "train" else None
    single.command(name, epilog=epilog)(getattr(module, name))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a model once, low-rank with ordered ranks, and get every size out.",
    epilog="Start with: [bold]lod demo[/bold]",
)


def _say_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"lod {__version__}\n")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Which one.")
    ] = False,
) -> None:
    """Train a model once, low-rank with ordered ranks, and get every size out."""


# what does not fit is said in one line; torch would log a page about it before
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

# typer brings its own click, or uses the installed one: take the class from where typer has it
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


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
    except ModuleNotFoundError as error:
        code = complain(
            f"lod needs more than the library itself ({error}): {install_command('cli')}", 1
        )
    except Exception as error:
        if "embedded null" in str(error):
            sys.exit(complain("a path has a NUL character in it. Give another.", 2))
        traceback.print_exc()
        code = complain("this is a fault of lod, not yours; please report it with the above.", 1)
    sys.exit(code)
