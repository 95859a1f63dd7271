"""Reports of several ranks brought together for callbacks: pure, bounded."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

__all__ = ["ConsolidatedReport", "Consolidator"]

_MAX_WAITING = 1_000


@attrs.frozen
class ConsolidatedReport:
    """The n-th reports of the ranks that have made one.

    Attributes:
        report_index: Number of the report in the run.
        lines: World rank → history line, in rank order.
    """

    report_index: int
    lines: dict[int, bytes]


class Consolidator:
    """Gathers lines until a report is complete.

    A rank that has never reported is not waited for while others run ahead (only rank 0
    reporting is common), and no more than ``max_waiting`` reports ever wait: the oldest
    then goes out with what is there.

    Args:
        world_size: Ranks in the group.
        max_waiting: Reports that may wait, >= 1.
        waits_for_all: Wait for ranks that have never reported too, until they have finished.
    """

    def __init__(self, world_size: int, *, max_waiting: int = _MAX_WAITING, waits_for_all: bool = False) -> None:
        self._world_size, self._max_waiting = world_size, max_waiting
        self._lines: dict[int, dict[int, bytes]] = {}
        self._active: set[int] = set(range(world_size)) if waits_for_all else set()
        self._next_of: dict[int, int] = dict.fromkeys(self._active, -1)
        self._sent_below = -1

    def add(self, world_rank: int, report_index: int, line: bytes) -> Iterator[ConsolidatedReport]:
        """One line came; yields the reports that are ready now, in order."""
        if world_rank not in self._active:
            self._active.add(world_rank)
        self._next_of[world_rank] = report_index + 1
        if report_index >= self._sent_below:
            self._lines.setdefault(report_index, {})[world_rank] = line
        yield from self._ready(min(self._next_of[rank] for rank in self._active))

    def finished(self, world_rank: int) -> Iterator[ConsolidatedReport]:
        """A rank will report no more."""
        self._active.discard(world_rank)
        self._next_of.pop(world_rank, None)
        yield from self._ready(min(self._next_of.values(), default=1 << 62))

    def flush(self) -> Iterator[ConsolidatedReport]:
        """Everything that is left, at the end of an attempt."""
        yield from self._ready(1 << 62)

    def _ready(self, below: int) -> Iterator[ConsolidatedReport]:
        while self._lines:
            first = min(self._lines)
            if first >= below and len(self._lines) <= self._max_waiting:
                return
            lines = self._lines.pop(first)
            self._sent_below = first + 1
            yield ConsolidatedReport(first, dict(sorted(lines.items())))
