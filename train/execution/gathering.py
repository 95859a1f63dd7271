"""The waiting in ``train.collective``: who has come to a meeting is let go when all are there, or never will be."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import CollectiveError, explained
from .meeting import Meetings

__all__ = ["Gathering"]

_NOTICE_S = 30.0


class Gathering:
    """The collectives of one attempt.

    Args:
        world_size: Ranks that must come.
        warn: Takes a line for the user's log.
    """

    def __init__(self, world_size: int, warn: Callable[[str], None]) -> None:
        self._meetings = Meetings(world_size)
        self._warn = warn
        self._filled: dict[int, asyncio.Event] = {}
        self._is_over = False

    async def meet(self, world_rank: int, kind: str, payload: Any, timeout_s: float) -> Any:
        """Bring a rank together with all others; returns what rank 0 brought, or why it cannot be."""
        try:
            number, meeting, is_complete = self._meetings.arrive(world_rank, kind, payload)
        except ValueError as error:
            return CollectiveError(str(error))
        filled = self._filled.setdefault(number, asyncio.Event())
        if is_complete:
            filled.set()
            self._filled.pop(number, None)
            return meeting.payload
        deadline = time.monotonic() + timeout_s
        while not filled.is_set() and not self._meetings.never_fills(meeting) and not self._is_over:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(filled.wait(), min(left, _NOTICE_S))
                break
            if world_rank == min(meeting.arrived) and deadline > time.monotonic():
                self._warn(f"{kind}() is still waiting for {self._meetings.missing(meeting)}")
        if self._meetings.is_complete(meeting):
            return meeting.payload
        if self._is_over:
            return CollectiveError(f"the attempt ends, and with it {kind}() on rank {world_rank}")
        why = "they have finished" if self._meetings.never_fills(meeting) else f"not within timeout_s={timeout_s:g}"
        return CollectiveError(
            explained(
                f"{kind}() on rank {world_rank} waits in vain for {self._meetings.missing(meeting)}: {why}; "
                "every rank must make the same collective calls"
            )
        )

    def finished(self, world_rank: int) -> None:
        """A rank has returned: who waits for it is told that it will not come."""
        self._let_go(self._meetings.finished(world_rank))

    def excuse(self, world_ranks: Iterable[int]) -> None:
        """Wait no longer for these ranks."""
        self._let_go(self._meetings.excuse(world_ranks))

    def end(self) -> None:
        """Nobody waits any longer for ranks that will not come."""
        self._is_over = True
        self._let_go(list(self._filled))

    def _let_go(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._filled:
                self._filled[number].set()
