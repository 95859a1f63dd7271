"""What a train function is told, and what counts as its answer."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from ray_lite.train.context import preemption
from ray_lite.train.context.preemption import Notices, PreemptionInfo
from ray_lite.train.execution.decide import common_report


def test_a_report_after_it_was_told_is_the_answer():
    notices = Notices()
    notices.ask_for_checkpoint()
    assert notices.wants_checkpoint(0)
    assert notices.wants_checkpoint(0)
    notices.reported()
    assert not notices.wants_checkpoint(0)


def test_a_report_of_a_rank_that_does_not_know_yet_is_none():
    """The notice comes while report() stores a checkpoint: a function that only asks here would never leave."""
    notices = Notices()
    notices.preempt(PreemptionInfo(deadline_ms=1))
    notices.reported()
    assert notices.wants_checkpoint(0)
    notices.reported()
    assert not notices.wants_checkpoint(0)


def test_a_new_notice_asks_anew():
    notices = Notices()
    notices.ask_for_checkpoint()
    assert notices.wants_checkpoint(0)
    notices.reported()
    notices.preempt(PreemptionInfo(deadline_ms=1))
    assert not notices.has_seen_preemption
    assert notices.wants_checkpoint(0)
    assert notices.has_seen_preemption
    assert notices.preemption == PreemptionInfo(deadline_ms=1)


def test_ranks_are_told_before_the_same_report_wherever_they_are():
    notices = Notices()
    notices.preempt(PreemptionInfo(deadline_ms=None), from_report=7)
    assert notices.preemption is not None
    for num_reports in range(7):
        assert not notices.wants_checkpoint(num_reports)
        notices.reported()
    assert notices.wants_checkpoint(7)
    # Until it has answered.
    assert notices.wants_checkpoint(7)
    notices.reported()
    assert not notices.wants_checkpoint(8)


def test_a_rank_that_is_past_that_report_or_never_comes_to_it_is_told_all_the_same(monkeypatch):
    notices = Notices()
    notices.ask_for_checkpoint(from_report=3)
    assert notices.wants_checkpoint(9)
    notices = Notices()
    notices.ask_for_checkpoint(from_report=3)
    assert not notices.wants_checkpoint(0)
    now = preemption.time.monotonic()
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now + 2.1)
    assert notices.wants_checkpoint(0)


def test_with_little_time_left_it_is_told_sooner(monkeypatch):
    notices = Notices()
    notices.preempt(PreemptionInfo(deadline_ms=int((preemption.time.time() + 4) * 1_000)), from_report=3)
    now = preemption.time.monotonic()
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now + 1.05)
    assert notices.wants_checkpoint(0)


@given(first=st.integers(0, 1_000), num=st.integers(1, 100_000), per_s=st.floats(0.001, 10_000))
def test_the_common_report_is_one_that_no_rank_has_come_to_when_it_hears_of_it(first, num, per_s):
    assume(num / per_s >= 1e-3)
    found = common_report(first, num, num / per_s)
    # The furthest may be one further than known, and goes on for half a second.
    assert found >= first + num + 1 + per_s * 0.49
    assert found <= first + num + 3 + per_s * 0.51


def test_ranks_that_have_not_reported_are_told_at_once():
    assert common_report(5, 0, 100.0) == 5
