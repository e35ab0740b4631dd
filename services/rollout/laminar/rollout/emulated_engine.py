"""`python -m laminar.rollout.emulated_engine FD`: the process of the emulated engine, a child of the agent."""

from __future__ import annotations

import logging
import sys
import time

from laminar.shell.process import die_with_parent


def main() -> int:
    started_s = time.monotonic()
    # Before anything that takes time: a parent that dies meanwhile must not leave us behind.
    die_with_parent()
    from laminar.rollout.emulated_loop import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return serve(int(sys.argv[1]), started_s)


if __name__ == "__main__":
    sys.exit(main())
