"""One rank of the training group; torchrun starts it as `python -m laminar.trainer.rank`.

The first thing it does, before torch is imported, is to tie its life to the launcher's.
"""

from __future__ import annotations

import os
import sys

from laminar.shell.process import die_with_parent

AGENT_PID = "LAMINAR_AGENT_PID"


def main() -> int:
    die_with_parent()
    if os.environ.get(AGENT_PID) == str(os.getppid()):
        return 1  # the launcher died before the line above, and the agent inherited this process
    from laminar.trainer.training import main as train

    return train()


if __name__ == "__main__":
    sys.exit(main())
