"""A rank's tie to the launcher above it: agent -> torchrun -> rank."""

from __future__ import annotations

import os

from laminar.shell.process import die_with_parent

AGENT_PID = "LAMINAR_AGENT_PID"
"""Set by the agent for everything below it."""


def live_with_launcher() -> bool:
    """From now on the kernel kills this rank when its launcher ends. False: the launcher has ended already.

    torchrun starts ranks in sessions of their own, so no signal to a group of processes would reach them.
    """
    die_with_parent()
    # The agent adopts what the launcher leaves behind.
    return os.environ.get(AGENT_PID) != str(os.getppid())
