"""The command `laminar`. Each command is one module with a function `command`; this file only names them."""

from __future__ import annotations

import typer

from laminar.cli import commands, run

app = typer.Typer(
    name="laminar",
    help="Asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.command)
commands.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
