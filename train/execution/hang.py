"""Does anything still move? Pure: fed with moments, asked with moments."""

from __future__ import annotations

__all__ = ["HangWatch"]

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

    def late_rank(self) -> int | None:
        """The unfinished rank that stopped moving first; the one with the fewest signs among equals.

        Signs travel: of two within half a second the one that arrived first need not have been
        first, but a rank that hangs has missed a report that the others have made.
        """
        if not self._moved:
            return None
        first = min(self._moved.values())
        early = [rank for rank, moved in self._moved.items() if moved <= first + _SAME_TIME_S]
        return min(early, key=lambda rank: (self._num_signs[rank], self._moved[rank], rank))
