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
    is_cascade,
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
    """Not even that of floats, which the doubling wait reaches after a thousand failures that got nowhere."""
    assert restarts(FailureKind.WORKER, FailureConfig(max_failures=-1), 2_000) == 2_000


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


@pytest.mark.parametrize("kind", list(FailureKind))
@pytest.mark.parametrize("fail_fast", [True, "raise"])
def test_fail_fast_ends_the_run_at_the_first_failure_of_any_kind(kind, fail_fast):
    """Start-ups have a budget of their own, and were tried again all the same."""
    step = after_failure(kind, Counts(), FailureConfig(fail_fast=fail_fast, max_preemption_failures=-1))
    assert not step.is_restart
    assert step.reason == f"fail_fast={fail_fast!r} ends the run at the first failure"


@pytest.mark.parametrize("kind", list(FailureKind))
def test_without_fail_fast_the_reason_says_nothing_of_it(kind):
    assert "fail_fast" not in after_failure(kind, Counts(), FailureConfig(max_failures=1)).reason


def test_the_reason_names_the_budget():
    assert "max_failures=2" in after_failure(FailureKind.WORKER, Counts(), FailureConfig(max_failures=2)).reason


USER = ("ValueError", "boom")
ECHO = ("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:20345")


@given(num_echoes=st.integers(0, 7), culprit=st.integers(0, 7), delay=st.floats(0, 5))
def test_the_users_exception_comes_before_its_echoes_even_when_it_arrives_later(num_echoes, culprit, delay):
    failures = [(rank, *ECHO, 100.0, False) for rank in range(8) if rank != culprit][:num_echoes]
    failures.append((culprit, *USER, 100.0 + delay, False))
    assert order_by_cause(failures)[0] == culprit


DEATH = ("WorkerDiedError", "SIGKILL")
# As a database or a licence server refuses, with or without torch in the process.
REFUSED = ("ConnectionError", "HTTPConnectionPool(host='db', port=80): [Errno 111] Connection refused")
# (type name, message, causes), as a worker tells of its exception.
ECHOES = [
    (*ECHO, ()),
    ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.", ()),
    ("RuntimeError", "[/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv", ()),
    ("MyError", "step 7 failed", (ECHO,)),
    ("MyError", "step 7 failed", (("OtherError", "all_reduce"), ECHO)),
    ("MyError", f"step 7 failed: {ECHO[1]}", ()),
    ("MyError", "step 7 failed", (("DistStoreError", "wait timeout"),)),
    ("MyError", "the connection", (REFUSED, ECHO)),
]
CONNECTIONS = [(*REFUSED, ()), ("MyError", "no data", (REFUSED,)), ("BrokenPipeError", "", ())]


def failed(rank, told, at=1.0):
    type_name, message, causes = told
    return (rank, type_name, message, at, False, causes)


def test_a_dead_process_comes_before_the_echo_and_after_an_exception():
    order = order_by_cause([(0, *ECHO, 1.0, False), (1, *DEATH, 2.0, True), (2, *USER, 3.0, False)])
    assert order == [2, 1, 0]


@pytest.mark.parametrize("echo", ECHOES)
def test_an_echo_is_known_by_whatever_it_was_raised_from(echo):
    """``raise MyError() from gloo_error`` came before the process that had died."""
    assert is_cascade(*echo)
    assert order_by_cause([failed(0, echo), (1, *DEATH, 2.0, True)]) == [1, 0]
    assert order_by_cause([failed(0, echo), failed(1, (*USER, ()), at=3.0)]) == [1, 0]


@pytest.mark.parametrize("refused", CONNECTIONS)
@pytest.mark.parametrize("echo", ECHOES)
def test_a_connection_of_the_users_own_is_the_cause_when_nobody_has_died(refused, echo):
    """Also when the clock of its node goes after those of the others."""
    assert order_by_cause([failed(0, echo), failed(1, refused, at=9.0), failed(2, echo)])[0] == 1
    assert order_by_cause([failed(0, refused), (1, *DEATH, 2.0, True)]) == [1, 0]
    assert order_by_cause([failed(3, refused)]) == [3]


def test_an_exception_whose_causes_are_the_users_own_is_no_echo():
    assert not is_cascade("MyError", "step 7 failed", (USER, ("KeyError", "'loss'")))
    assert order_by_cause([failed(0, ("MyError", "", (USER,)), at=5.0), (1, *DEATH, 2.0, True)]) == [0, 1]
