"""A meeting of all ranks: who is there, who is missing. Pure; the waiting is done elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from .failures import format_ranks

__all__ = ["Meeting", "Meetings"]


@attrs.define
class Meeting:
    """One call of a collective.

    Attributes:
        kind: ``"barrier"`` or ``"broadcast"``.
        arrived: The ranks that have made the call.
        payload: What rank 0 brought.
    """

    kind: str
    arrived: set[int] = attrs.field(factory=set)
    payload: Any = None


class Meetings:
    """The collectives of one attempt, numbered by each rank's own count.

    Args:
        world_size: Ranks that must come.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._next = [0] * world_size
        self._open: dict[int, Meeting] = {}
        self._finished: set[int] = set()
        self._excused: set[int] = set()
        self._past: dict[int, Meeting] = {}

    def arrive(self, world_rank: int, kind: str, payload: Any) -> tuple[int, Meeting, bool]:
        """A rank makes its next call.

        Returns:
            The number of the call, its meeting, and whether all are there now.

        Raises:
            ValueError: Another rank made a different call at this place.
        """
        number = self._next[world_rank]
        self._next[world_rank] += 1
        meeting = self._past.get(number) or self._open.setdefault(number, Meeting(kind))
        if meeting.kind != kind:
            raise ValueError(
                f"rank {world_rank} called {kind}() as its collective number {number + 1}, where "
                f"{format_ranks(sorted(meeting.arrived))} called {meeting.kind}(); all ranks must make the same calls"
            )
        meeting.arrived.add(world_rank)
        if world_rank == 0:
            meeting.payload = payload
        is_complete = self.is_complete(meeting)
        if is_complete:
            self._close(number, meeting)
        return number, meeting, is_complete

    def _close(self, number: int, meeting: Meeting) -> None:
        self._open.pop(number, None)
        if len(meeting.arrived) < self._world_size:
            # Those who were excused may come all the same, and get what the others got.
            self._past[number] = meeting
        else:
            self._past.pop(number, None)

    def is_complete(self, meeting: Meeting) -> bool:
        """Whether all are there that must be."""
        return len(meeting.arrived | self._excused) == self._world_size

    def excuse(self, world_ranks: Iterable[int]) -> list[int]:
        """Wait no longer for these ranks; returns the numbers of the meetings that are complete without them.

        Rank 0 is always waited for: it brings what the others get.
        """
        self._excused |= set(world_ranks) - {0}
        complete = {number: meeting for number, meeting in self._open.items() if self.is_complete(meeting)}
        for number, meeting in complete.items():
            self._close(number, meeting)
        return list(complete)

    def finished(self, world_rank: int) -> list[int]:
        """A rank has returned and will come to no meeting; returns the numbers of those that now never fill."""
        self._finished.add(world_rank)
        return [number for number, meeting in self._open.items() if world_rank not in meeting.arrived]

    def never_fills(self, meeting: Meeting) -> bool:
        """Whether a rank that is missing has finished."""
        return bool(self._finished - meeting.arrived - self._excused)

    def missing(self, meeting: Meeting) -> str:
        """The ranks that have not come, for messages."""
        missing = sorted(set(range(self._world_size)) - meeting.arrived)
        gone = sorted(self._finished - meeting.arrived)
        text = format_ranks(missing)
        return f"{text} (of which {format_ranks(gone)} finished already)" if gone else text
