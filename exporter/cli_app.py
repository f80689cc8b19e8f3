"""The command line's application, and what all its commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from sinkring.exporter.cli_faults import one_line_faults
from typer.core import TyperGroup

VALIDATION_FAILED = 1


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        # Inside typer's own handling, which knows other exit statuses for Ctrl-C and a closed pipe.
        with one_line_faults():
            return super().invoke(ctx)


app = typer.Typer(
    name="sinkring",
    cls=_Commands,
    help="Run a trained decoder for ever in fixed memory: export it, build engines, run it, prove it.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help and plain errors: rich takes as long to load as all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        # Here, since it takes as long to load as the rest of `--help`.
        from importlib.metadata import version

        typer.echo(f"sinkring {version('sinkring')}")
        raise typer.Exit


@app.callback()
def main_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    # Without a docstring: the application's own help stays.
    pass


BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by `sinkring export`.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
