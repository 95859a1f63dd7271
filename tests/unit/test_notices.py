"""What a train function is told, and what counts as its answer."""

from __future__ import annotations

from ray_lite.train.context.preemption import Notices, PreemptionInfo


def test_a_report_after_it_was_told_is_the_answer():
    notices = Notices()
    notices.ask_for_checkpoint()
    assert notices.wants_checkpoint
    assert notices.wants_checkpoint
    notices.reported()
    assert not notices.wants_checkpoint


def test_a_report_of_a_rank_that_does_not_know_yet_is_none():
    """The notice comes while report() stores a checkpoint: a function that only asks here would never leave."""
    notices = Notices()
    notices.preempt(PreemptionInfo(deadline_ms=1))
    notices.reported()
    assert notices.wants_checkpoint
    notices.reported()
    assert not notices.wants_checkpoint


def test_a_new_notice_asks_anew():
    notices = Notices()
    notices.ask_for_checkpoint()
    assert notices.wants_checkpoint
    notices.reported()
    notices.preempt(PreemptionInfo(deadline_ms=1))
    assert not notices.has_seen_preemption
    assert notices.wants_checkpoint
    assert notices.has_seen_preemption
    assert notices.preemption == PreemptionInfo(deadline_ms=1)
