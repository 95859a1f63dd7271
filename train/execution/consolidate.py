"""Reports of several ranks brought together for callbacks: pure, bounded."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from .progress import ALL_COMPLETE, LowestMark

__all__ = ["ConsolidatedReport", "Consolidator"]

_MAX_WAITING = 1_000
_MAX_WAITING_BYTES = 256 << 20


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
    reporting is common). Neither more than ``max_waiting`` reports nor more than
    ``max_waiting_bytes`` of lines ever wait: the oldest then goes out with what is there.
    One report may wait whatever its size, so that a large group with long lines still gets
    whole ones. The cost of a line does not grow with the number of ranks.

    Args:
        world_size: Ranks in the group.
        max_waiting: Reports that may wait, >= 1.
        max_waiting_bytes: Bytes of lines that may wait, >= 0.
        waits_for_all: Wait for ranks that have never reported too, until they have finished.
    """

    def __init__(
        self,
        world_size: int,
        *,
        max_waiting: int = _MAX_WAITING,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        waits_for_all: bool = False,
    ) -> None:
        self._world_size, self._max_waiting, self._max_waiting_bytes = world_size, max_waiting, max_waiting_bytes
        self._lines: dict[int, dict[int, bytes]] = {}
        self._num_bytes = 0
        # Number of the next report of each rank that is waited for, and the lowest of them.
        self._next_of: dict[int, int] = dict.fromkeys(range(world_size), -1) if waits_for_all else {}
        self._lowest_next = LowestMark()
        if waits_for_all:
            self._lowest_next.add(-1, world_size)
        self._oldest = ALL_COMPLETE
        self._sent_below = -1

    def add(self, world_rank: int, report_index: int, line: bytes) -> Iterator[ConsolidatedReport]:
        """One line came; yields the reports that are ready now, in order."""
        self._move(world_rank, report_index + 1)
        # What comes after its report went out is left out: each report goes out once.
        if report_index >= self._sent_below:
            self._lines.setdefault(report_index, {})[world_rank] = line
            self._num_bytes += len(line)
            self._oldest = min(self._oldest, report_index)
        yield from self._ready(self._lowest_next.value)

    def finished(self, world_rank: int) -> Iterator[ConsolidatedReport]:
        """A rank will report no more."""
        self._move(world_rank, None)
        yield from self._ready(self._lowest_next.value)

    def flush(self) -> Iterator[ConsolidatedReport]:
        """Everything that is left, at the end of an attempt."""
        yield from self._ready(ALL_COMPLETE)

    def _move(self, world_rank: int, new: int | None) -> None:
        old = self._next_of.pop(world_rank, None)
        if old is not None:
            self._lowest_next.remove(old)
        if new is not None:
            self._next_of[world_rank] = new
            self._lowest_next.add(new)

    def _ready(self, below: int) -> Iterator[ConsolidatedReport]:
        while self._lines and (self._oldest < below or self._is_full()):
            index = self._oldest
            lines = self._lines.pop(index)
            self._num_bytes -= sum(map(len, lines.values()))
            self._sent_below = index + 1
            # The next report is nearly always the next number; a look at all is the rare case.
            self._oldest = index + 1 if index + 1 in self._lines else min(self._lines, default=ALL_COMPLETE)
            yield ConsolidatedReport(index, dict(sorted(lines.items())))

    def _is_full(self) -> bool:
        num_waiting = len(self._lines)
        return num_waiting > self._max_waiting or (num_waiting > 1 and self._num_bytes > self._max_waiting_bytes)
