"""Clocks, and the news that long polls wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clock:
    """`monotonic_s` judges deadlines; `wall_s` is for people."""

    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time


class Signal:
    """Wakes everybody who waits at this moment."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


async def until(decide: Callable[[], T | None], news: Signal) -> T:
    """The first answer of `decide` that is not None; asked now and after each news. The caller sets the limit."""
    while True:
        answer = decide()
        if answer is not None:
            return answer
        await news.wait()
