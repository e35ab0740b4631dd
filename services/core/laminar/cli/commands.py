"""The commands that look at runs and job files: thin, and lazy, so that `laminar --help` imports next to nothing.

Each ends with one paragraph and exit code 2 for what the user can mend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from laminar.cli.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, EXIT_FAILED, EXIT_INTERRUPTED, BadInput

DEFAULT_SAMPLES = 8
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or the name of one in ./runs.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Adds every command of this module."""
    for function in (status, audit, report, samples, logs, export, validate):
        app.command(function.__name__)(function)


def status(
    run: RunArgument,
    *,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again every second until the run ends.")] = False,
) -> None:
    """Where a run stands: from its pool while it runs, else from what is on disk."""
    from laminar.cli import status as command

    with _refusing():
        path = _folder(run)
        if json:
            typer.echo(command.as_json(path))
        else:
            command.show(path, watch=watch)


def audit(run: RunArgument, *, json: JsonOption = False) -> None:
    """Prove from the ledger that no trajectory was lost or used twice. Exit code 1 if the proof fails."""
    from laminar.cli import audit as command

    with _refusing():
        found = command.audit(_folder(run))
        typer.echo(command.as_json(found) if json else command.as_text(found))
    raise typer.Exit(EXIT_COMPLETE if found.ok else EXIT_FAILED)


def report(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="File to write; RUN/report.html if not given.")] = None,
) -> None:
    """Write the report of a run: one HTML file that needs nothing else."""
    from laminar.cli import report as command

    with _refusing():
        typer.echo(command.write_report(_folder(run), out))


def samples(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="A training step; the newest if not given.", min=1)] = None,
    number: Annotated[int, typer.Option("--n", "-n", help="Trajectories to print.", min=1)] = DEFAULT_SAMPLES,
    *,
    json: JsonOption = False,
) -> None:
    """Print prompts and responses of a step, with rewards and versions."""
    from laminar.cli import samples as command

    with _refusing():
        found_step, found = command.read(_folder(run), step, number)
        for line in (command.as_json if json else command.as_text)(found_step, found):
            typer.echo(line)


def logs(
    run: RunArgument,
    slot: Annotated[str | None, typer.Argument(help="One process, e.g. rollout-1; all, merged by time.")] = None,
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the logs grow.")] = False,
) -> None:
    """Print the logs of a run's processes."""
    from laminar.cli import logs as command

    with _refusing():
        path = _folder(run)
        files = command.chosen(path, slot)
        width = 0 if slot else max((len(name) for name in files), default=0)
        if not follow:
            for entry in command.merged(files):
                typer.echo(command.as_text(entry, width))
            return
        follower = command.Follower(path, slot)
        for entry in command.tail(files, command.TAIL_ENTRIES):
            typer.echo(command.as_text(entry, width))
        while True:
            for entry in follower.news():
                typer.echo(command.as_text(entry, width))
            sys.stdout.flush()
            follower.wait()


def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option(help="The new Hugging Face folder.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="A kept checkpoint; the final model if not given.", min=0)] = None,
) -> None:
    """Write the trained model as a Hugging Face folder."""
    from laminar.cli import export as command

    with _refusing():
        typer.echo(command.export(_folder(run), step, to))


def validate(
    file: Annotated[Path, typer.Argument(help="The job: a LaminarJob as YAML.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="path=value, e.g. steps=10; may be given again.")
    ] = None,
) -> None:
    """Check a job file and the files it names, without running it."""
    from laminar.cli import validate as command

    with _refusing():
        typer.echo(command.as_text(file, command.validate(file, overrides or [])))


def _folder(run: Path) -> Path:
    """A bare name means ./runs/NAME, where `laminar run` puts it, unless there is such a folder here."""
    named = Path("runs") / run
    return named if not run.exists() and named.is_dir() else run


@contextmanager
def _refusing() -> Generator[None]:
    """Bad input ends with its paragraph; so does a reader that went away (`laminar logs RUN | head`)."""
    try:
        yield
    except BadInput as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_COMPLETE) from None
