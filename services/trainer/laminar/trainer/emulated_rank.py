"""`python -m laminar.trainer.emulated_rank`: all ranks of an emulated trainer in one process without torch.

The agent starts it with the tie to its own life that torchrun gets, too.
"""

from __future__ import annotations

import sys

from laminar.trainer import loop
from laminar.trainer.emulated import run

if __name__ == "__main__":
    sys.exit(loop.main(run))
