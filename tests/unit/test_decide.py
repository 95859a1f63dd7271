"""Budgets are exact, and the culprit comes before its echoes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.configs import FailureConfig
from ray_lite.train.execution.decide import (
    MAX_START_FAILURES,
    Counts,
    FailureKind,
    after_failure,
    order_by_cause,
)


def restarts(kind: FailureKind, config: FailureConfig, most: int) -> int:
    counts, number = Counts(), 0
    while number < most:
        step = after_failure(kind, counts, config)
        counts = step.counts
        if not step.is_restart:
            break
        number += 1
    return number


@given(max_failures=st.integers(0, 30))
def test_max_failures_is_the_number_of_restarts(max_failures):
    assert restarts(FailureKind.WORKER, FailureConfig(max_failures=max_failures), 100) == max_failures


def test_minus_one_has_no_limit():
    assert restarts(FailureKind.WORKER, FailureConfig(max_failures=-1), 500) == 500


@given(max_failures=st.integers(0, 5), preemptions=st.integers(0, 20))
def test_preemptions_do_not_use_up_max_failures(max_failures, preemptions):
    config, counts = FailureConfig(max_failures=max_failures), Counts()
    for _ in range(preemptions):
        step = after_failure(FailureKind.PREEMPTION, counts, config)
        assert step.is_restart
        counts = step.counts
    assert counts.failures == 0
    assert after_failure(FailureKind.WORKER, counts, config).is_restart == (max_failures > 0)


def test_start_failures_have_a_small_limit_of_their_own_that_a_start_resets():
    config = FailureConfig(max_failures=-1)
    assert restarts(FailureKind.START, config, 100) == MAX_START_FAILURES - 1
    counts = after_failure(FailureKind.START, Counts(), config).counts.after_start()
    assert counts.start_failures_in_a_row == 0


@pytest.mark.parametrize("kind", [FailureKind.WORKER, FailureKind.PREEMPTION])
def test_only_start_failures_in_a_row_end_a_run(kind):
    config, counts = FailureConfig(max_failures=-1), Counts()
    for _ in range(20):
        for failed in [FailureKind.START] * (MAX_START_FAILURES - 1) + [kind]:
            step = after_failure(failed, counts, config, made_progress=True)
            assert step.is_restart
            counts = step.counts


@pytest.mark.parametrize("fail_fast", [True, "raise"])
def test_fail_fast_never_restarts(fail_fast):
    assert not after_failure(FailureKind.WORKER, Counts(), FailureConfig(fail_fast=fail_fast)).is_restart


def test_the_reason_names_the_budget():
    assert "max_failures=2" in after_failure(FailureKind.WORKER, Counts(), FailureConfig(max_failures=2)).reason


USER = ("ValueError", "boom")
ECHO = ("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:20345")


@given(num_echoes=st.integers(0, 7), culprit=st.integers(0, 7), delay=st.floats(0, 5))
def test_the_users_exception_comes_before_its_echoes_even_when_it_arrives_later(num_echoes, culprit, delay):
    failures = [(rank, *ECHO, 100.0, False) for rank in range(8) if rank != culprit][:num_echoes]
    failures.append((culprit, *USER, 100.0 + delay, False))
    assert order_by_cause(failures)[0] == culprit


def test_a_dead_process_comes_before_the_echo_and_after_an_exception():
    order = order_by_cause(
        [(0, *ECHO, 1.0, False), (1, "WorkerDiedError", "SIGKILL", 2.0, True), (2, *USER, 3.0, False)]
    )
    assert order == [2, 1, 0]
