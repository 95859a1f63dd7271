"""Who meets whom: every interleaving of calls, and ranks that are excused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.execution.meeting import Meetings

ORDERS = st.integers(1, 5).flatmap(
    lambda size: st.tuples(st.just(size), st.permutations([rank for rank in range(size) for _ in range(3)]))
)


@given(case=ORDERS)
def test_a_call_is_complete_with_its_last_rank_and_all_get_what_rank_0_brought(case):
    size, order = case
    meetings = Meetings(size)
    seen = {}
    made = [0] * size
    for rank in order:
        number, meeting, is_complete = meetings.arrive(rank, "broadcast", (rank, made[rank]))
        assert number == made[rank]
        made[rank] += 1
        seen.setdefault(number, set()).add(rank)
        assert is_complete == (len(seen[number]) == size)
        if is_complete:
            assert meeting.payload == (0, number)


@given(case=ORDERS, data=st.data())
def test_excused_ranks_are_not_waited_for_and_may_come_all_the_same(case, data):
    size, order = case
    excused = data.draw(st.sets(st.integers(0, size - 1)))
    moment = data.draw(st.integers(0, len(order)))
    meetings = Meetings(size)
    waiting, made, done = {}, [0] * size, set()
    for step, rank in enumerate([*order, None]):
        if step == moment:
            for number in meetings.excuse(excused):
                assert number not in done
                done.add(number)
        if rank is None:
            break
        number, meeting, is_complete = meetings.arrive(rank, "broadcast", made[rank])
        made[rank] += 1
        waiting.setdefault(number, set()).add(rank)
        missing = set(range(size)) - waiting[number]
        assert is_complete == (not missing or (step >= moment and missing <= excused - {0}))
        if is_complete:
            done.add(number)
            assert meeting.payload == number
    assert done == {0, 1, 2}


def test_rank_0_is_always_waited_for():
    meetings = Meetings(2)
    meetings.arrive(1, "barrier", None)
    assert meetings.excuse([0]) == []


def test_a_rank_that_has_finished_never_comes_unless_it_was_excused():
    meetings = Meetings(3)
    _, meeting, _ = meetings.arrive(0, "barrier", None)
    assert meetings.finished(2) == [0]
    assert meetings.never_fills(meeting)
    assert "rank 2 finished already" in meetings.missing(meeting)
    assert meetings.excuse([2]) == []
    assert not meetings.never_fills(meeting)


def test_a_different_call_at_the_same_place_is_refused():
    meetings = Meetings(2)
    meetings.arrive(0, "barrier", None)
    with pytest.raises(ValueError, match=r"rank 1 called broadcast\(\) as its collective number 1"):
        meetings.arrive(1, "broadcast", None)
