"""What follows the end of an attempt: pure functions of counts and configs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import TypeAlias

import attrs

from ..configs.failure import FailureConfig

__all__ = ["Counts", "FailureKind", "NextStep", "after_failure", "common_report", "is_cascade", "order_by_cause"]

MAX_START_FAILURES = 3
"""Start-ups in a row that may fail before the run gives up, whatever ``max_failures`` says."""


_HEARD_WITHIN_S = 0.5
MAX_DELAY_S = 60.0
"""The longest wait before a restart."""


class FailureKind(str, Enum):
    """Why an attempt ended; each kind has its own budget."""

    WORKER = "worker"
    """A train function raised, or a worker process died."""
    START = "start"
    """The workers could not be set up."""
    PREEMPTION = "preemption"
    """A node was taken away."""


@attrs.frozen(kw_only=True)
class Counts:
    """Failures so far, over one ``fit()``.

    Attributes:
        failures: Failed attempts that count against ``max_failures``.
        start_failures_in_a_row: Start-ups that failed since the last that worked.
        preemptions: Attempts that ended with the loss of a node.
        failures_without_progress: Failed attempts in a row in which no rank reported anything.
    """

    failures: int = 0
    start_failures_in_a_row: int = 0
    preemptions: int = 0
    failures_without_progress: int = 0

    def after_start(self) -> Counts:
        """The counts once a worker group has started."""
        return attrs.evolve(self, start_failures_in_a_row=0)


@attrs.frozen(kw_only=True)
class NextStep:
    """What to do now.

    Attributes:
        is_restart: Start another attempt; otherwise the run ends with the error.
        counts: The counts to go on with.
        reason: For the log and the error: which budget applied.
        delay_s: Seconds to wait before the restart, before jitter.
    """

    is_restart: bool
    counts: Counts
    reason: str
    delay_s: float = 0.0


def after_failure(kind: FailureKind, counts: Counts, config: FailureConfig, *, made_progress: bool = False) -> NextStep:
    """Restart or give up, by the budget of this kind of failure.

    ``max_failures=n`` means n restarts, so n + 1 attempts; -1 means no limit. The first
    restart is immediate; from the second failure in a row on that got nowhere, the wait
    doubles: 1, 2, 4 ... at most 60 s. With ``fail_fast`` the first failure of any kind is the last.

    Args:
        kind: Which budget.
        counts: Failures so far.
        config: The budgets.
        made_progress: Whether any rank reported anything in the attempt.
    """
    in_a_row = 0 if made_progress else counts.failures_without_progress + 1
    counts = attrs.evolve(counts, failures_without_progress=in_a_row)
    # The power is bounded too: with no limit of restarts it would overflow one day.
    delay_s = min(MAX_DELAY_S, 2.0 ** min(in_a_row - 2, 10)) if in_a_row >= 2 else 0.0
    if kind is FailureKind.START:
        used = counts.start_failures_in_a_row + 1
        counts = attrs.evolve(counts, start_failures_in_a_row=used)
        is_restart = used < MAX_START_FAILURES
        reason = f"start-up failed {used} of at most {MAX_START_FAILURES} times in a row"
    else:
        # The workers had started, so that start-ups are no longer failing in a row.
        counts = counts.after_start()
        if kind is FailureKind.PREEMPTION:
            used, limit, name = counts.preemptions + 1, config.max_preemption_failures, "max_preemption_failures"
            counts = attrs.evolve(counts, preemptions=used)
        else:
            used, limit, name = counts.failures + 1, config.max_failures, "max_failures"
            counts = attrs.evolve(counts, failures=used)
        is_restart = limit < 0 or used <= limit
        reason = f"failure {used} ({'without limit' if limit < 0 else f'{name}={limit}'})"
    if config.fail_fast:
        # Whatever the budgets say: each kind has its own, and forgetting this one let start-ups restart.
        is_restart, reason = False, f"fail_fast={config.fail_fast!r} ends the run at the first failure"
    return NextStep(is_restart=is_restart, counts=counts, reason=reason, delay_s=delay_s)


# What only torch says, and only when a peer goes away or does not answer (gloo, NCCL, ``TCPStore``; torch 2.13).
_ECHO_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_ECHO_SIGNS = (
    "gloo/transport",
    "connection closed by peer",
    "connection was likely closed",
    "remote process exited",
    "application timeout caused pair closure",
    "store->get",
    "failed to connect to any network address",
)
# What a user's own connection, to a database or a licence server, says just as well.
_CONNECTION_TYPES = {"BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError"}
_CONNECTION_SIGNS = ("broken pipe", "connection refused", "connection reset by peer", "socket closed")


class _Group(IntEnum):
    """Failures of one attempt, the likely cause first."""

    OWN = 0
    DEATH = 1
    CONNECTION = 2
    ECHO = 3


_Causes: TypeAlias = Sequence[tuple[str, str]]
_Failure: TypeAlias = tuple[int, str, str, float, bool] | tuple[int, str, str, float, bool, _Causes]


def is_cascade(type_name: str, message: str, causes: _Causes = ()) -> bool:
    """Whether an exception may be the echo of another rank's death.

    Args:
        type_name: Its class name.
        message: Its text.
        causes: ``(type name, message)`` of each exception that it was raised from, or while
            handling which: a user may wrap what the library said in an error of their own.
    """
    return _group_of(type_name, message, causes) is not _Group.OWN


def _group_of(type_name: str, message: str, causes: _Causes) -> _Group:
    group = _Group.OWN
    for name, text in [(type_name, message), *causes]:
        lowered = text.lower()
        if name in _ECHO_TYPES or any(sign in lowered for sign in _ECHO_SIGNS):
            return _Group.ECHO
        if name in _CONNECTION_TYPES or any(sign in lowered for sign in _CONNECTION_SIGNS):
            group = _Group.CONNECTION
    return group


def order_by_cause(failures: Sequence[_Failure]) -> list[int]:
    """World ranks of failed workers, the likely culprit first.

    An exception of the user's own comes before the death of a process, and both before errors
    that only say that a peer is gone. Of these, what a connection of the user's own says too comes
    before what only torch says: a database that refuses one rank is the cause of what gloo then
    says on the others. Among equals the earlier one comes first, then the lower rank.

    Args:
        failures: ``(world_rank, type name, message, unix time, process died)`` each, and perhaps
            the causes of the exception, as ``is_cascade`` takes them.
    """

    def key(failure: _Failure) -> tuple[_Group, float, int]:
        rank, type_name, message, failed_at, has_died = failure[:5]
        causes = failure[5] if len(failure) == 6 else ()
        return (_Group.DEATH if has_died else _group_of(type_name, message, causes), failed_at, rank)

    return [failure[0] for failure in sorted(failures, key=key)]


def common_report(first_report_index: int, num_reports: int, elapsed_s: float) -> int:
    """Number of a report that no rank has come to yet when it hears of it: where all can save the same step.

    Args:
        first_report_index: Number of the attempt's first report.
        num_reports: Reports that the furthest rank is known to have made in it, >= 0.
        elapsed_s: Seconds since its train functions have started, >= 0.
    """
    if num_reports == 0:
        # They report rarely, or at the end: each is before its first one, and told at once.
        return first_report_index
    per_s = num_reports / max(elapsed_s, 1e-3)
    # The furthest has passed the beginning of its next step already.
    return first_report_index + num_reports + 1 + math.ceil(per_s * _HEARD_WITHIN_S)
