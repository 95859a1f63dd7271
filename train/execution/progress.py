"""When is report *i* complete? Pure bookkeeping over the ranks of one attempt."""

from __future__ import annotations

__all__ = ["ALL_COMPLETE", "Progress"]

ALL_COMPLETE = 1 << 62
"""``complete_below`` once every rank has finished."""


class Progress:
    """Counts the reports of each rank.

    Report *i* is complete when each rank has made it, with its files durable, or has
    finished. The cost of an event does not depend on the number of ranks.

    Args:
        world_size: Ranks in the group, >= 1.
        first_index: Number of the first report of the attempt, >= 0.
    """

    def __init__(self, world_size: int, first_index: int) -> None:
        self._next = [first_index] * world_size
        self._pending: list[set[int]] = [set() for _ in range(world_size)]
        self._mark = [first_index] * world_size
        self._is_finished = [False] * world_size
        # How many unfinished ranks stand at each mark; its lowest key is the answer.
        self._ranks_at: dict[int, int] = {first_index: world_size}
        self._low = first_index

    @property
    def complete_below(self) -> int:
        """Every report with a lower number is complete; ``ALL_COMPLETE`` when all ranks have finished."""
        return self._low

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
        self._ranks_at[old] -= 1
        if not self._ranks_at[old]:
            del self._ranks_at[old]
        self._ranks_at[new] = self._ranks_at.get(new, 0) + 1
        if old == self._low and old not in self._ranks_at:
            # The next mark is nearly always the next number; a look at all keys is the rare case.
            self._low = old + 1 if old + 1 in self._ranks_at else min(self._ranks_at)
