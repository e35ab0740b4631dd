"""`python -m laminar.trainer`: the agent of one trainer attempt."""

from laminar.shell.service import start
from laminar.trainer.agent import main

if __name__ == "__main__":
    start(main)
