"""Who stopped first, from signs that arrive late and out of order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.execution.hang import HangWatch


def test_a_run_hangs_when_none_of_its_unfinished_ranks_moves():
    watch = HangWatch(3, now=0.0)
    watch.moved(1, 10.0)
    assert watch.silent_for(12.0) == 2.0
    watch.finished(1)
    assert watch.silent_for(12.0) == 12.0
    watch.finished(0)
    watch.finished(2)
    assert watch.silent_for(12.0) == 0.0
    assert watch.late_rank() is None


def test_of_slow_ranks_the_one_that_stopped_first_is_late():
    watch = HangWatch(3, now=0.0)
    for rank, moment in ((0, 60.0), (1, 30.0), (2, 61.0)):
        watch.moved(rank, moment, num_signs=9 - rank)
    assert watch.late_rank() == 1


@given(num_ranks=st.integers(2, 8), late=st.integers(0, 7), delays=st.lists(st.floats(0, 0.2), min_size=8, max_size=8))
def test_of_quick_ranks_the_one_with_a_report_missing_is_late_in_whatever_order_they_arrive(num_ranks, late, delays):
    """Reports come a millisecond apart, and each takes its own time to the controller."""
    late %= num_ranks
    watch = HangWatch(num_ranks, now=0.0)
    for rank in range(num_ranks):
        num_reports = 4 if rank == late else 5
        watch.moved(rank, 10.0 + num_reports * 0.001 + delays[rank], num_signs=num_reports)
    assert watch.late_rank() == late
