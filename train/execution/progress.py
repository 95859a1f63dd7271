"""When is report *i* complete? Pure bookkeeping over the ranks of one attempt."""

from __future__ import annotations

import heapq

__all__ = ["ALL_COMPLETE", "LowestMark", "Progress"]

ALL_COMPLETE = 1 << 62
"""``complete_below`` once every rank has finished."""

_SPARE = 64


class LowestMark:
    """The lowest of the marks at which many stand.

    A step costs the same however many stand there, and at most the logarithm of the number of
    different marks: a look at all of them for each report made the cost of a report grow with the
    number of ranks.
    """

    def __init__(self) -> None:
        self._num_at: dict[int, int] = {}
        # Each mark in use is in the heap; one that is no longer in use goes when it comes to the top.
        self._heap: list[int] = []

    @property
    def value(self) -> int:
        """The lowest mark; ``ALL_COMPLETE`` when nobody stands anywhere."""
        while self._heap and self._heap[0] not in self._num_at:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else ALL_COMPLETE

    def __len__(self) -> int:
        """How many different marks are held in memory."""
        return len(self._heap)

    def add(self, mark: int, count: int = 1) -> None:
        """``count`` more stand at ``mark``."""
        if mark not in self._num_at:
            heapq.heappush(self._heap, mark)
        self._num_at[mark] = self._num_at.get(mark, 0) + count
        if len(self._heap) > 2 * len(self._num_at) + _SPARE:
            # One that lags for long would keep the marks of all others alive.
            self._heap = sorted(self._num_at)

    def remove(self, mark: int) -> None:
        """One that stood at ``mark`` has left."""
        self._num_at[mark] -= 1
        if not self._num_at[mark]:
            del self._num_at[mark]


class Progress:
    """Counts the reports of each rank.

    Report *i* is complete when each rank has made it, with its files durable, or has
    finished. The cost of an event does not grow with the number of ranks.

    Args:
        world_size: Ranks in the group, >= 1.
        first_index: Number of the first report of the attempt, >= 0.
    """

    def __init__(self, world_size: int, first_index: int) -> None:
        self._next = [first_index] * world_size
        self._pending: list[set[int]] = [set() for _ in range(world_size)]
        self._mark = [first_index] * world_size
        self._is_finished = [False] * world_size
        self._lowest = LowestMark()
        self._lowest.add(first_index, world_size)

    @property
    def complete_below(self) -> int:
        """Every report with a lower number is complete; ``ALL_COMPLETE`` when all ranks have finished."""
        return self._lowest.value

    def num_reports(self, world_rank: int) -> int:
        """The number that the next report of this rank will have."""
        return self._next[world_rank]

    def is_finished(self, world_rank: int) -> bool:
        """Whether the train function of this rank has returned."""
        return self._is_finished[world_rank]

    def reported(self, world_rank: int, report_index: int, *, is_pending: bool = False) -> None:
        """This rank has made report ``report_index``; its files may still be on their way.

        Raises:
            ValueError: Reports of a rank must come in order, without gaps.
        """
        if report_index != self._next[world_rank]:
            raise ValueError(
                f"rank {world_rank} sent report {report_index}, but report {self._next[world_rank]} comes next"
            )
        self._next[world_rank] += 1
        if is_pending:
            self._pending[world_rank].add(report_index)
        self._move(world_rank)

    def upload_ended(self, world_rank: int, report_index: int) -> None:
        """The files that were pending with a report are durable, or have failed."""
        self._pending[world_rank].discard(report_index)
        self._move(world_rank)

    def finished(self, world_rank: int) -> None:
        """The train function of this rank has returned: nobody waits for it any more."""
        self._is_finished[world_rank] = True
        self._move(world_rank)

    def laggards(self, report_index: int) -> list[int]:
        """Ranks for which report ``report_index`` still waits."""
        return [rank for rank, mark in enumerate(self._mark) if mark <= report_index and not self._is_finished[rank]]

    def _move(self, world_rank: int) -> None:
        old = self._mark[world_rank]
        if self._is_finished[world_rank]:
            new = ALL_COMPLETE
        else:
            pending = self._pending[world_rank]
            new = min(pending) if pending else self._next[world_rank]
        if new == old:
            return
        self._mark[world_rank] = new
        self._lowest.remove(old)
        self._lowest.add(new)
