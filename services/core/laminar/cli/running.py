"""What `laminar run` does: admits the run, resolves its sources, drives it to its end, writes its report."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from rich.console import Console

from laminar.cli import checkpoints, room, sources
from laminar.cli.driver import Driver, Ending
from laminar.cli.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, EXIT_FAILED, EXIT_INTERRUPTED, BadInput
from laminar.cli.launch import Launchpad, machine_names
from laminar.cli.live import LiveView
from laminar.cli.recorders import attach
from laminar.cli.report import write_report
from laminar.cli.run import Options
from laminar.cli.run_folder import JobRecord, RunFolder, Standing, check_unchanged, claim, new_record
from laminar.cli.view import JsonView, PlainView, QuietView, View
from laminar.core.snapshot import Spec
from laminar.shell.process import become_subreaper
from laminar.wire.job_file import JobFileError, job_digest, load_job
from laminar.wire.sources import absolute, local_path
from laminar.wire.spec import LaminarJob


def choose_view(*, quiet: bool, json: bool) -> View:
    """`json` wins over `quiet`; a terminal gets the live screen, a pipe plain lines."""
    if json:
        return JsonView(sys.stdout)
    if quiet:
        return QuietView(sys.stdout)
    return LiveView(Console()) if sys.stdout.isatty() else PlainView(sys.stdout)


def execute(file: Path, overrides: list[str], options: Options, view: View) -> int:
    """Runs the job; returns the exit code. Raises BadInput before any process of the job has started."""
    try:
        job = load_job(file, overrides)
    except JobFileError as error:
        raise BadInput(str(error)) from error
    asked = absolute(job, file.absolute().parent)
    sources.check(asked)
    path = (options.run or Path("runs") / job.metadata.name).absolute()
    with claim(path, fresh=options.fresh) as held:
        run = held.folder
        record = _admit(run, asked, options)
        if record is None:
            result = run.result()
            assert result is not None
            view.note(f"{path} is complete; --fresh starts over, more steps go on from here.")
            view.ended(result, run)
            return EXIT_COMPLETE
        become_subreaper()
        spec = placement(asked, options.machines)
        launchpad = Launchpad(run, job.metadata.name, record.uid, spec, options.port)
        try:
            resolved = _resolved(run, asked, view)
            room.check(resolved.spec, local_path(resolved.spec.model.source), path, len(spec.nodes))
            run.forget_result()
            run.write_job(record, resolved)
            view = attach(view, resolved)
            view.started(resolved, run)
            driver = Driver(run, spec, record.uid, resolved.spec.steps, launchpad, view, options.resume_from)
            ending = asyncio.run(_drive(driver))
        finally:
            launchpad.close()
        if not ending.bad_input:
            _report(run, view)
        view.ended(ending.result, run)
        return exit_code(ending)


def placement(job: LaminarJob, num_machines: int) -> Spec:
    """Rollouts round-robin over min(replicas, `num_machines`) pretend machines."""
    replicas = job.spec.rollout.replicas
    return Spec(
        num_rollouts=replicas,
        nodes=machine_names(min(replicas, num_machines)),
        backoff_limit=job.spec.trainer.backoff_limit,
    )


def exit_code(ending: Ending) -> int:
    if ending.bad_input:
        return EXIT_BAD_INPUT
    return {"complete": EXIT_COMPLETE, "stopped": EXIT_INTERRUPTED}.get(ending.result.phase, EXIT_FAILED)


def _admit(run: RunFolder, asked: LaminarJob, options: Options) -> JobRecord | None:
    """The record of this run, new or kept; None: it has finished and nothing more is asked. Raises BadInput."""
    stored = run.job()
    if stored is None:
        if options.resume_from is not None:
            raise BadInput(f"--resume-from {options.resume_from}: {run.path} holds no run that could go back.")
        return new_record(asked)
    check_unchanged(run.path, stored.requested, asked)
    if options.resume_from is not None:
        checkpoints.find(run, options.resume_from)
    grown = asked.spec.steps > stored.requested.spec.steps
    if run.standing() is Standing.FINISHED and not grown and options.resume_from is None:
        return None
    return stored.model_copy(update={"requested": asked, "digest": job_digest(asked)})


def _resolved(run: RunFolder, asked: LaminarJob, view: View) -> LaminarJob:
    """As the run was started, with today's number of steps; recipes are made again only if their files are gone."""
    stored = run.spec()
    if stored is not None:
        resolved = stored.model_copy(update={"spec": stored.spec.model_copy(update={"steps": asked.spec.steps})})
        try:
            sources.check(resolved)
        except BadInput:
            view.note("What the run was started with is gone; making it again.")
        else:
            return resolved
    resolved = asyncio.run(sources.resolve(asked, view.note))
    sources.check(resolved)
    return resolved


def _report(run: RunFolder, view: View) -> None:
    """A run that trained is not a failure because its report cannot be written."""
    try:
        write_report(run.path)
    except BadInput as error:
        view.note(str(error))


async def _drive(driver: Driver) -> Ending:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, driver.interrupt)
    return await driver.run()
