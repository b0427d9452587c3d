"""Entry point of `lod`; a user's mistake is one line on stderr and exit code 2."""

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
    from maestro_lod.cli.user_code import UserCodeError
except ImportError as missing:  # the library works without the packages of the program
    sys.exit(f"lod needs more than the library itself ({missing}): {install_command('cli')}")

COMMANDS = {
    "train": (
        "cli.commands.training",
        "Train a recipe; write model, metrics and report to a directory.",
    ),
    "resume": (
        "cli.commands.training",
        "Resume a run that was stopped, killed or interrupted, exactly where it ended.",
    ),
    "tune": (
        "cli.commands.training",
        "Search a penalty λ that gives a model within limits on size and accuracy.",
    ),
    "compare": (
        "baselines.compare.command",
        "Train compression methods on your task under equal conditions, and rank them.",
    ),
    "report": (
        "cli.commands.results",
        "Write a self-contained HTML page about one run, or a comparison of several.",
    ),
    "summary": (
        "cli.commands.results",
        "Print rank, parameters and MACs of every layer of a recipe or a finished run.",
    ),
    "demo": (
        "cli.commands.demo",
        "Run a demonstration in half a minute: train, find every size, deploy one, compare.",
    ),
    "recipes": ("cli.commands.demo", "List the recipes of the library."),
    "frontier": (
        "cli.commands.results",
        "Search the best ranks of every size, without training, and add them to the report.",
    ),
    "deploy": (
        "cli.commands.results",
        "Export the model of a run, in full or cut to a size, and verify the files.",
    ),
    "bench": (
        "cli.commands.results",
        "Print latency, size and test accuracy of the dense model and of smaller sizes.",
    ),
    "compress": (
        "cli.commands.compressing",
        "Compress a pretrained model to a limit, using data but no training.",
    ),
    "distill": (
        "cli.commands.compressing",
        "Train a compressed transformers model to reproduce the outputs of the original.",
    ),
    "verify": (
        "cli.commands.results",
        "Check that files are as they were written; exit with 1 if one is damaged.",
    ),
}
"""Module and help of each command; `lod --help` imports none of the modules."""


_RENAMED = {
    "heal": "distill",
    "deploy --fast": "--prefer-speed",
    "deploy --heal": "--finetune-epochs",
    "compress --fast": "--no-correction",
    "compress --heal": "--distill-steps",
}
"""Former names of commands and options, and their present names."""


class _Commands(TyperGroup):
    """Commands by name; the module of a command, and torch with it, is imported on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1], rich_markup_mode="rich")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        for old in (name, *(f"{name} {option.partition('=')[0]}" for option in rest)):
            if old in _RENAMED:
                ctx.fail(f"{old.removeprefix(f'{name} ')!r} is called {_RENAMED[old]!r} now.")
        if name not in COMMANDS:
            ctx.fail(f"No such command {name!r}.{suggest(name, COMMANDS)}")
        return name, _load(name, with_settings=name == "train" and "--help" in rest), rest


def _load(name: str, *, with_settings: bool = False) -> Any:
    """Import a command; its help lists all settings only on demand: that imports every method."""
    module = importlib.import_module(f"maestro_lod.{COMMANDS[name][0]}")
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    epilog = module.settings_help() if with_settings else None
    single.command(name, epilog=epilog)(getattr(module, name))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a PyTorch model once, low-rank with ordered ranks, and deploy it in every size.",
    epilog="Start with: [bold]lod demo[/bold]",
)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"lod {__version__}\n")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train a PyTorch model once, low-rank with ordered ranks, and deploy it in every size."""


# torch would log a page before the one-line error about mismatched shapes
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

# typer brings its own click, or uses the installed one: take the class from where typer has it
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main(arguments: list[str] | None = None) -> None:
    """Run the program; ends with exit code 0, 1 (failed), 2 (wrong input) or 130 (interrupted)."""
    keep_freed_memory()
    try:
        code = app(args=arguments, prog_name="lod", standalone_mode=False) or 0
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)  # the traceback of the user's code
        code = complain(error, 1)
    except (TrainingError, CheckpointError) as error:
        code = complain(error, 1)
    except MaestroError as error:
        code = complain(error, 2)
    except _UsageError as error:
        message = error.format_message()  # empty if the help was shown instead
        end = "" if message.endswith((".", "?")) else "."
        code = complain(f"{message}{end} See: lod --help", 2) if message else 2
    except (KeyboardInterrupt, typer.Abort):
        code = complain("interrupted.", 130)
    except BrokenPipeError:  # `lod … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = complain(
            f"{error.filename or 'the system refused a request'}: {error.strerror or error}.", 1
        )
    except ModuleNotFoundError as error:
        code = complain(
            f"lod needs more than the library itself ({error}): {install_command('cli')}", 1
        )
    except Exception as error:
        if "embedded null" in str(error):
            sys.exit(complain("a path contains a NUL character. Give another path.", 2))
        traceback.print_exc()
        code = complain("this is a bug in lod; please report it with the traceback above.", 1)
    sys.exit(code)
