"""A report is complete when each rank has made it, or has finished: never sooner, never hanging."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.execution.progress import ALL_COMPLETE, LowestMark, Progress


class Model:
    """The definition, spelt out rank by rank."""

    def __init__(self, world_size: int, first: int) -> None:
        self.next = [first] * world_size
        self.pending: list[set[int]] = [set() for _ in range(world_size)]
        self.finished = [False] * world_size

    def complete_below(self) -> int:
        marks = [
            ALL_COMPLETE if done else min([*pending, upcoming])
            for upcoming, pending, done in zip(self.next, self.pending, self.finished, strict=True)
        ]
        return min(marks)


@given(data=st.data(), world_size=st.integers(1, 6), first=st.integers(0, 50))
def test_any_order_of_events_agrees_with_the_definition(data, world_size, first):
    progress, model = Progress(world_size, first), Model(world_size, first)
    for _ in range(data.draw(st.integers(0, 40))):
        rank = data.draw(st.integers(0, world_size - 1))
        action = data.draw(st.sampled_from(["report", "pending", "ended", "finish"]))
        if action == "finish":
            progress.finished(rank)
            model.finished[rank] = True
        elif action == "ended":
            if model.pending[rank]:
                index = data.draw(st.sampled_from(sorted(model.pending[rank])))
                progress.upload_ended(rank, index)
                model.pending[rank].discard(index)
        elif not model.finished[rank]:
            index = model.next[rank]
            progress.reported(rank, index, is_pending=action == "pending")
            model.next[rank] += 1
            if action == "pending":
                model.pending[rank].add(index)
        assert progress.complete_below == model.complete_below()
        assert progress.num_reports(rank) == model.next[rank]


def test_a_gap_in_the_numbers_is_our_own_mistake_and_is_named():
    progress = Progress(2, 0)
    with pytest.raises(ValueError, match="rank 1 sent report 1, but report 0 comes next"):
        progress.reported(1, 1)


def test_laggards_are_the_ranks_a_report_still_waits_for():
    progress = Progress(3, 0)
    progress.reported(0, 0)
    progress.finished(2)
    assert progress.laggards(0) == [1]


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=200))
def test_the_lowest_mark_is_the_lowest_whatever_came_and_went(steps):
    lowest, standing = LowestMark(), []
    for arrives, mark in steps:
        if arrives:
            lowest.add(mark)
            standing.append(mark)
        elif mark in standing:
            lowest.remove(mark)
            standing.remove(mark)
        assert lowest.value == min(standing, default=ALL_COMPLETE)


def test_a_rank_that_lags_for_long_does_not_fill_the_memory_with_the_marks_of_the_others():
    progress = Progress(2, 0)
    for index in range(5_000):
        progress.reported(0, index)
        assert progress.complete_below == 0
        assert len(progress._lowest) <= 100


def test_the_marks_in_memory_do_not_grow_with_the_number_of_ranks():
    progress = Progress(4_096, 0)
    for index in range(3):
        for rank in range(4_096):
            progress.reported(rank, index)
            assert progress.complete_below == (index + 1 if rank == 4_095 else index)
            assert len(progress._lowest) <= 3
