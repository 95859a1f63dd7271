"""What a train function is told, and what counts as its answer."""

from __future__ import annotations

import pytest

from ray_lite.train.context.preemption import Notices, PreemptionInfo


@pytest.mark.parametrize("has_files", [False, True])
def test_a_report_after_it_was_told_is_the_answer(has_files):
    notices = Notices()
    notices.ask_for_checkpoint()
    assert notices.wants_checkpoint
    assert notices.wants_checkpoint
    notices.reported(has_files=has_files)
    assert not notices.wants_checkpoint


def test_a_report_without_files_from_a_rank_that_does_not_know_yet_is_none():
    notices = Notices()
    notices.ask_for_checkpoint()
    notices.reported(has_files=False)
    assert notices.wants_checkpoint


def test_a_checkpoint_is_one_even_if_nobody_had_asked_whether_it_is_wanted():
    notices = Notices()
    notices.ask_for_checkpoint()
    notices.reported(has_files=True)
    assert not notices.wants_checkpoint


def test_a_new_notice_asks_anew():
    notices = Notices()
    notices.ask_for_checkpoint()
    assert notices.wants_checkpoint
    notices.reported(has_files=False)
    notices.preempt(PreemptionInfo(deadline_ms=1))
    assert not notices.has_seen_preemption
    assert notices.wants_checkpoint
    assert notices.has_seen_preemption
    assert notices.preemption == PreemptionInfo(deadline_ms=1)
