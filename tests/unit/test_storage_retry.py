"""What is tried again, how often, and for how long."""

from __future__ import annotations

import errno
import threading

import pytest

from ray_lite.train.storage.retry import RetryPolicy, is_transient
from ray_lite.train.testing.clock import ManualClock


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, code, status):
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """As gcsfs' and aiohttp's."""

    def __init__(self, code):
        super().__init__(f"HTTP {code}")
        self.code = code


class NoCredentialsError(Exception):
    """As botocore's."""


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        OSError("connection closed"),
        OSError(errno.EIO, "io"),
        OSError(errno.ENETDOWN, "net"),
        EOFError(),
        ClientError("SlowDown", 503),
        ClientError("InternalError", 500),
        ClientError("RequestTimeout", 408),
        HttpError(429),
        HttpError(502),
        RuntimeError("Session is closed"),
        caused_by(OSError("wrapped"), ClientError("SlowDown", 503)),
    ],
)
def test_what_may_pass_is_transient(error):
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "denied"),
        FileNotFoundError("no bucket"),
        NotADirectoryError(),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
        ClientError("AccessDenied", 403),
        ClientError("NoSuchBucket", 404),
        HttpError(401),
        NoCredentialsError(),
        ImportError("s3fs"),
        TypeError(),
        ValueError(),
        caused_by(OSError("wrapped"), ClientError("AccessDenied", 403)),
        KeyboardInterrupt(),
    ],
)
def test_what_will_not_pass_is_permanent(error):
    assert not is_transient(error)


BUSY = OSError("busy")


def failing(times, error=BUSY):
    calls = []

    def operation():
        calls.append(None)
        if len(calls) <= times:
            raise error
        return len(calls)

    return operation, calls


def test_waits_grow_and_are_bounded():
    clock = ManualClock()
    policy = RetryPolicy(sleep=clock.sleep, random=lambda: 1.0, base_s=0.1, cap_s=1.0)
    operation, _ = failing(7)
    assert policy.call(operation, what="x") == 8
    assert clock.slept_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


def test_jitter_spreads_the_waits_of_many_ranks():
    lengths = {RetryPolicy().wait_s(3) for _ in range(20)}
    assert len(lengths) > 10
    assert all(0.2 <= length <= 0.4 for length in lengths)


def test_the_last_error_is_raised_after_all_tries():
    clock = ManualClock()
    operation, calls = failing(100)
    with pytest.raises(OSError, match="busy"):
        RetryPolicy(sleep=clock.sleep).call(operation, what="x")
    assert len(calls) == 12
    assert 10 < sum(clock.slept_s) < 60


def test_a_permanent_error_is_raised_at_once():
    clock = ManualClock()
    operation, calls = failing(100, PermissionError(13, "denied"))
    with pytest.raises(PermissionError):
        RetryPolicy(sleep=clock.sleep).call(operation, what="x")
    assert (len(calls), clock.slept_s) == (1, [])


def test_an_operation_that_never_answers_is_given_up_and_tried_again():
    clock, never, calls = ManualClock(), threading.Event(), []

    def operation():
        calls.append(None)
        if len(calls) == 1:
            never.wait()
        return "answer"

    policy = RetryPolicy(sleep=clock.sleep, deadline_s=0.05)
    assert policy.call(operation, what="x") == "answer"
    with pytest.raises(TimeoutError, match="no answer within 0 s: read s3://b/x"):
        RetryPolicy(max_attempts=1, deadline_s=0.01).call(never.wait, what="read s3://b/x")
    never.set()


def test_a_clock_moves_only_when_told_to():
    clock = ManualClock(10.0)
    clock.sleep(5.0)
    clock.advance(1.0)
    assert clock() == clock.now() == 16.0
    assert clock.slept_s == [5.0]
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)
