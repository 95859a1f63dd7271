"""Does anything still move? Pure: fed with moments, asked with moments."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["HangWatch", "frames_of_main_thread", "is_collective", "waits_for_others"]

# Where a rank stands that waits for the others, among its innermost frames.
_WAITING_FILES = (
    os.sep + os.path.join("torch", "distributed") + os.sep,
    os.path.join(str(Path(__file__).resolve().parent.parent), "collective.py"),
)
_MAX_WAITING_FRAMES = 8

_SAME_TIME_S = 0.5


class HangWatch:
    """Remembers when each rank last gave a sign of life.

    A run hangs when none of its unfinished ranks has moved for the limit: as long as one
    does, the others may be waiting for it by right, or may never report at all.

    Args:
        world_size: Ranks, >= 1.
        now: Seconds, on any clock that only grows.
    """

    def __init__(self, world_size: int, now: float) -> None:
        self._moved = dict.fromkeys(range(world_size), now)
        self._num_signs = dict.fromkeys(range(world_size), 0)

    def moved(self, world_rank: int, now: float, *, num_signs: int = 1) -> None:
        """A rank has reported, or beaten; ``num_signs`` times at once."""
        if world_rank in self._moved:
            self._moved[world_rank] = max(now, self._moved[world_rank])
            self._num_signs[world_rank] += num_signs

    def finished(self, world_rank: int) -> None:
        """A rank has returned: nobody waits for a sign from it."""
        self._moved.pop(world_rank, None)

    def silent_for(self, now: float) -> float:
        """Seconds since any unfinished rank moved; 0.0 when all have finished."""
        return now - max(self._moved.values(), default=now)

    def late_rank(self, among: Collection[int] | None = None) -> int | None:
        """The unfinished rank that stopped moving first; the one with the fewest signs among equals.

        Args:
            among: Only these may be the one; by default any.

        Signs travel: of two within half a second the one that arrived first need not have been
        first, but a rank that hangs has missed a report that the others have made.
        """
        moments = {rank: moved for rank, moved in self._moved.items() if among is None or rank in among}
        if not moments:
            return None
        first = min(moments.values())
        early = [rank for rank, moved in moments.items() if moved <= first + _SAME_TIME_S]
        return min(early, key=lambda rank: (self._num_signs[rank], self._moved[rank], rank))


def frames_of_main_thread(stacks: str) -> list[str]:
    """The main thread's frames, innermost first, from what ``faulthandler`` writes of all threads.

    That thread comes last.
    """
    parts = [part for part in stacks.split("\n\n") if 'File "' in part]
    return [line.strip() for line in parts[-1].splitlines() if 'File "' in line] if parts else []


def waits_for_others(stacks: str) -> bool:
    """Whether a rank stands in a collective: then it is another one that does not come."""
    return any(map(is_collective, frames_of_main_thread(stacks)[:_MAX_WAITING_FRAMES]))


def is_collective(frame: str) -> bool:
    """Whether a frame is one of a collective."""
    return any(file in frame for file in _WAITING_FILES)
