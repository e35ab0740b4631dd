"""The torchrun command of one attempt on this machine."""

from __future__ import annotations

import os
import sys
from typing import assert_never

from laminar.shell.process import child_environment
from laminar.trainer.ancestry import AGENT_PID
from laminar.trainer.pulse import BOARD
from laminar.trainer.settings import TrainerSettings
from laminar.wire.spec import Trainer, TrainerType

RANK_MODULE = "laminar.trainer.rank"
EMULATED_MODULE = "laminar.trainer.emulated_rank"


def command(settings: TrainerSettings, trainer: Trainer) -> list[str]:
    """What the agent starts: torchrun, or the one process that emulates a group. It dies with its parent."""
    launcher = [sys.executable, "-m", "laminar.shell.process", sys.executable, "-m"]
    match trainer.type:
        case TrainerType.TORCH:
            return launcher + _torchrun(settings, trainer.replicas)
        case TrainerType.EMULATED:
            return [*launcher, EMULATED_MODULE]
        case _:
            assert_never(trainer.type)


def _torchrun(settings: TrainerSettings, num_ranks: int) -> list[str]:
    """The group restarts as a whole, by the driver: torchrun never restarts a rank.

    Port 0: the rendezvous and the ranks' store take free ports, so that two jobs on one machine never meet.
    """
    return [
        "torch.distributed.run",
        "--max-restarts=0",
        "--nnodes=1",
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={settings.common.job_uid}-{settings.attempt}",
        "--local-addr=127.0.0.1",
        "-m", RANK_MODULE,
    ]  # fmt: skip


def environment(board_path: str) -> dict[str, str]:
    """One thread a rank: on busy cores more threads are far slower. The ranks of one machine talk over loopback,
    which needs no resolvable host name. `board_path`: where they show that they get on."""
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return child_environment(**chosen, **{AGENT_PID: str(os.getpid()), BOARD: board_path})
