"""What a rank says to the pool. Each thread has a `Books` of its own: the client below serves one thread."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from laminar.shell.blocking import BlockingClient, Unreachable
from laminar.trainer.settings import TrainerSettings
from laminar.wire.dataplane import BatchSlice
from laminar.wire.messages import (
    Ack,
    BeginAttempt,
    BeginAttemptReply,
    CheckpointDurable,
    CheckpointDurableReply,
    CheckpointFailed,
    CheckpointInfo,
    CommitStep,
    PublicationView,
    ReservedVersion,
    ReserveVersion,
    ResumePoint,
    Take,
    TakeReply,
    TakeStatus,
)

CALL_DEADLINE_S = 300.0
"""A pool that stays away longer ends the attempt; below the ranks' collective time-out, so that this is the reason."""
TAKE_WAIT_S = 5.0
"""How late a rank may notice that it is asked to stop while it waits for a batch."""
TAKE_ANSWER_S = 2.0
"""What the pool gets beyond that: an answer at the last moment would be lost otherwise, and the connection with it."""


class Books:
    """Every call may be repeated. Raises Refused (Conflict: a newer attempt exists) or Unreachable."""

    def __init__(self, settings: TrainerSettings, name: str) -> None:
        common = settings.common
        self._attempt = settings.attempt
        self._client = BlockingClient(
            common.pool_url, common.token, common.job_uid, common.generation, f"{common.slot}/{name}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def resume(self, at_most: int | None) -> ResumePoint:
        params = {} if at_most is None else {"at_most": at_most}
        return self._client.get_json("/v1/trainer/resume", ResumePoint, deadline_s=CALL_DEADLINE_S, params=params)

    def begin(self, restored_step: int, num_damaged: int = 0) -> BeginAttemptReply:
        body = BeginAttempt(attempt=self._attempt, restored_step=restored_step, num_damaged=num_damaged)
        return self._client.post_json("/v1/trainer/begin", body, BeginAttemptReply, deadline_s=CALL_DEADLINE_S)

    def reserve(self, step: int, parent: int | None) -> ReservedVersion:
        body = ReserveVersion(attempt=self._attempt, step=step, parent=parent)
        return self._client.post_json("/v1/trainer/reserve", body, ReservedVersion, deadline_s=CALL_DEADLINE_S)

    def publication(self, version: int, epoch: int, wait_s: float) -> PublicationView:
        """Long poll: answers when the version is visible, the epoch differs, or `wait_s` has passed."""
        params: dict[str, str | int | float] = {"attempt": self._attempt, "wait_s": wait_s, "epoch": epoch}
        path = f"/v1/trainer/publication/{version}"
        return self._client.get_json(path, PublicationView, wait_s + 10.0, deadline_s=CALL_DEADLINE_S, params=params)

    def take(self, step: int) -> TakeReply:
        """A long poll of a few seconds. A pool that is away is one more reason to wait."""
        body = Take(attempt=self._attempt, step=step, wait_s=TAKE_WAIT_S)
        try:
            limit_s = TAKE_WAIT_S + TAKE_ANSWER_S
            return self._client.post_json("/v1/trainer/take", body, TakeReply, limit_s, deadline_s=limit_s)
        except Unreachable:
            return TakeReply(status=TakeStatus.WAIT)

    def slice(self, step: int, rank: int, world: int) -> BatchSlice:
        params: dict[str, str | int | float] = {"attempt": self._attempt, "step": step, "rank": rank, "world": world}
        batch = self._client.get_msgpack(
            "/v1/trainer/slice", BatchSlice, 60.0, deadline_s=CALL_DEADLINE_S, params=params
        )
        assert (batch.step, batch.rank, batch.world) == (step, rank, world), f"asked {params}, got {batch.step}"
        return batch

    def commit(self, step: int, stats: dict[str, float]) -> None:
        body = CommitStep(attempt=self._attempt, step=step, stats=stats)
        self._client.post_json("/v1/trainer/commit", body, Ack, deadline_s=CALL_DEADLINE_S)

    def ledger(self, step: int) -> bytes:
        params = {"attempt": self._attempt, "step": step}
        return self._client.get_bytes("/v1/trainer/ledger", 60.0, deadline_s=CALL_DEADLINE_S, params=params)

    def checkpoint_durable(self, checkpoint: CheckpointInfo) -> CheckpointDurableReply:
        body = CheckpointDurable(attempt=self._attempt, checkpoint=checkpoint)
        return self._client.post_json(
            "/v1/trainer/checkpoint", body, CheckpointDurableReply, deadline_s=CALL_DEADLINE_S
        )

    def checkpoint_failed(self, step: int, reason: str) -> None:
        body = CheckpointFailed(attempt=self._attempt, step=step, reason=reason)
        self._client.post_json("/v1/trainer/checkpoint_failed", body, Ack, deadline_s=CALL_DEADLINE_S)
