"""`python -m laminar.rollout.torch_engine FD`: the process of the torch engine, a child of the agent."""

from __future__ import annotations

import logging
import sys
import time

from laminar.shell.process import die_with_parent


def main() -> int:
    started_s = time.monotonic()
    # Before torch is imported: that takes seconds, and a parent that dies meanwhile must not leave us behind.
    die_with_parent()
    from laminar.rollout.engine_loop import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return serve(int(sys.argv[1]), started_s)


if __name__ == "__main__":
    sys.exit(main())
