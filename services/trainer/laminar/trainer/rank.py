"""One rank of the training group; torchrun starts it as `python -m laminar.trainer.rank`.

The first thing it does, before torch is imported, is to tie its life to the launcher's.
"""

from __future__ import annotations

import sys

from laminar.trainer.ancestry import live_with_launcher
from laminar.trainer.failures import EXIT_CRASH


def main() -> int:
    if not live_with_launcher():
        return EXIT_CRASH
    from laminar.trainer.training import main as train

    return train()


if __name__ == "__main__":
    sys.exit(main())
