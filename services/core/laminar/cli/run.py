"""`laminar run FILE`: one job on this host, from its file to a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from laminar.cli.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, BadInput

DEFAULT_MACHINES = 2
"""Two pretend machines make a chain, so that a laptop runs what a cluster runs."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says, beside the job."""

    run: Path | None = None
    fresh: bool = False
    resume_from: int | None = None
    machines: int = DEFAULT_MACHINES
    port: int = 0
    """Of the pool; 0: a free one."""


def command(
    file: Annotated[Path, typer.Argument(help="The job: a LaminarJob as YAML.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="path=value, e.g. steps=10; may be given again.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; ./runs/NAME if not given.", show_default=False)] = None,
    *,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run in this folder aside.")] = False,
    resume_from: Annotated[
        int | None, typer.Option(help="Go back to the checkpoint of this step.", min=0, show_default=False)
    ] = None,
    machines: Annotated[int, typer.Option(help="Pretend machines that share the rollouts.", min=1)] = DEFAULT_MACHINES,
    port: Annotated[int, typer.Option(help="Port of the pool's page and API; 0: a free one.", min=0, max=65535)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only how it ended.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Train a model: starts every service of the job as a process on this host, and ends with the job.

    An unfinished run in the same folder goes on; Ctrl-C stops after a checkpoint, a second one at once.
    Exit code 0: complete, 1: failed, 2: bad input, 130: interrupted.
    """
    from laminar.cli import running  # half a second of imports that `laminar --help` does not need

    options = Options(run, fresh, resume_from, machines, port)
    try:
        code = running.execute(file, overrides or [], options, running.choose_view(quiet=quiet, json=json))
    except BadInput as error:
        typer.echo(str(error), err=True)
        code = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)
