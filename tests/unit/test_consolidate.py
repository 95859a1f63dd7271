"""Callbacks see the n-th reports of all ranks together, once, in order, and never wait for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.execution.consolidate import Consolidator


@given(data=st.data(), world_size=st.integers(1, 5), max_waiting=st.integers(1, 20))
def test_every_report_goes_out_at_most_once_and_in_order(data, world_size, max_waiting):
    consolidator = Consolidator(world_size, max_waiting=max_waiting)
    counts, out = [0] * world_size, []
    finished = [False] * world_size
    for _ in range(data.draw(st.integers(0, 60))):
        rank = data.draw(st.integers(0, world_size - 1))
        if finished[rank]:
            continue
        if data.draw(st.booleans()) or data.draw(st.booleans()):
            out += consolidator.add(rank, counts[rank], b"%d" % rank)
            counts[rank] += 1
        else:
            finished[rank] = True
            out += consolidator.finished(rank)
        assert len(consolidator._lines) <= max_waiting
    out += consolidator.flush()
    indices = [report.report_index for report in out]
    assert indices == sorted(set(indices))
    assert indices == list(range(max(counts)))


def test_equal_ranks_are_brought_together():
    consolidator = Consolidator(2)
    assert [r.report_index for r in consolidator.add(0, 0, b"a")] == [0]
    # Rank 1 is known from here on, and waited for.
    assert list(consolidator.add(1, 0, b"late")) == []
    assert list(consolidator.add(0, 1, b"b")) == []
    (report,) = consolidator.add(1, 1, b"c")
    assert report.lines == {0: b"b", 1: b"c"}


def test_rank_0_alone_is_not_held_up_by_ranks_that_never_report():
    consolidator = Consolidator(4)
    assert [r.report_index for i in range(5) for r in consolidator.add(0, i, b"x")] == [0, 1, 2, 3, 4]


def test_it_may_wait_for_ranks_that_have_never_reported():
    consolidator = Consolidator(2, waits_for_all=True)
    assert list(consolidator.add(1, 0, b"1")) == []
    (report,) = consolidator.add(0, 0, b"0")
    assert report.lines == {0: b"0", 1: b"1"}
    assert list(consolidator.add(0, 1, b"0")) == []
    (report,) = consolidator.finished(1)
    assert report.lines == {0: b"0"}
