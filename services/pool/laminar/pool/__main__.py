"""`python -m laminar.pool`: opens the store, reads the data, serves."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import datetime
from pathlib import Path

from prometheus_client import Histogram

from laminar.core.reconcile import EXIT_BAD_INPUT
from laminar.pool.app import add_routes
from laminar.pool.books import Books, JobIdentity
from laminar.pool.data import DataError
from laminar.pool.generation import found_generation
from laminar.pool.members import TICK_S
from laminar.pool.pool import Pool
from laminar.pool.prompts import load_prompts
from laminar.pool.restore import Stored
from laminar.pool.rows import meta
from laminar.pool.signals import Clock
from laminar.pool.status import BooksCollector
from laminar.pool.store import Owner, SqliteStore, StoreError, StoreUnavailable
from laminar.pool.tokenize import TokenizerError
from laminar.shell.service import Service, start
from laminar.shell.settings import Common, env_path

EXIT_AGAIN = 1
TICK_LIMIT_S = 10.0
COMMIT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


async def main(common: Common) -> int:
    """Serves until SIGTERM; what was acknowledged is in the store, whatever ends the process."""
    job = common.load_job()
    try:
        store = open_store(common)
    except StoreUnavailable as error:
        return _say(error, EXIT_AGAIN)
    except StoreError as error:
        return _say(error, EXIT_BAD_INPUT)
    try:
        stored = await store.load()
        clock = Clock()
        # Chat templates may ask for the date: a restarted pool must make the same prompts.
        began = datetime.fromtimestamp(float(stored.meta.get("started_wall_s", clock.wall_s())))
        prompts = load_prompts(job, began)
        _check_data(stored, prompts.digest, job.spec.data.train.source)
        books = Books(JobIdentity(job, common.job_uid, common.generation), prompts, store, stored, clock)
        books.journal.write(meta("data_digest", prompts.digest))
        return await _serve(common, books, store, stored)
    except (StoreError, DataError, TokenizerError) as error:
        return _say(error, EXIT_BAD_INPUT)
    finally:
        store.close()


def open_store(common: Common) -> SqliteStore:
    """The ledger in LAMINAR_STORE; of a new generation, begun from the checkpoint folder in LAMINAR_CHECKPOINT, if any.

    Raises StoreError, StoreUnavailable.
    """
    folder, owner = env_path("LAMINAR_STORE"), Owner(common.job_uid, common.generation)
    origin = os.environ.get("LAMINAR_CHECKPOINT")
    found_generation(folder, owner, Path(origin) if origin else None)
    return SqliteStore(folder, owner)


async def _serve(common: Common, books: Books, store: SqliteStore, stored: Stored) -> int:
    service = Service(common, title="pool", version="0.1.0", body_limit_bytes=256 * 2**20)
    pool = Pool(books, stored)
    pool.stopping = service.stopping.is_set
    books.journal.on_failure = service.fail
    latency = Histogram(
        "laminar_commit_seconds", "One transaction of the store", buckets=COMMIT_BUCKETS_S, registry=service.registry
    )
    store.on_commit = latency.observe
    service.registry.register(BooksCollector(books))
    add_routes(service, pool)
    return await service.run(_tick(service, pool))


async def _tick(service: Service, pool: Pool) -> None:
    """The pool's own clock. Not ready while nothing can be written: callers wait."""
    service.watch("tick", TICK_LIMIT_S)
    while not service.stopping.is_set():
        service.progress("tick")
        pool.tick()
        condition = pool.books.journal.store.condition
        service.set_ready(condition is None, ": ".join(condition) if condition else "")
        try:
            async with asyncio.timeout(TICK_S):
                await service.stopping.wait()
        except TimeoutError:
            continue
    await service.drained.wait()
    pool.books.journal.submit()


def _check_data(stored: Stored, digest: str, source: str) -> None:
    known = stored.meta.get("data_digest", digest)
    if known != digest:
        raise DataError(
            f"the prompts are not those that this job began with ({Path(source.removeprefix('file:'))} or another data "
            "file, or the tokenizer, changed): its ledger names prompts by their place. Start a new run."
        )


def _say(error: ValueError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    start(main)
