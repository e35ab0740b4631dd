"""`python -m laminar.rollout.grader FD`: a grader's worker process, a child of the agent."""

from __future__ import annotations

import logging
import sys

from laminar.shell.process import die_with_parent


def main() -> int:
    # Before anything else is imported: a parent that dies meanwhile must not leave us behind.
    die_with_parent()
    from laminar.rollout.grader_worker import serve

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return serve(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
