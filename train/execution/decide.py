"""What follows the end of an attempt: pure functions of counts and configs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import attrs

from ..configs.failure import FailureConfig

__all__ = ["Counts", "FailureKind", "NextStep", "after_failure", "order_by_cause"]

MAX_START_FAILURES = 3
"""Start-ups in a row that may fail before the run gives up, whatever ``max_failures`` says."""


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
    doubles: 1, 2, 4 ... at most 60 s.

    Args:
        kind: Which budget.
        counts: Failures so far.
        config: The budgets.
        made_progress: Whether any rank reported anything in the attempt.
    """
    in_a_row = 0 if made_progress else counts.failures_without_progress + 1
    counts = attrs.evolve(counts, failures_without_progress=in_a_row)
    delay_s = min(MAX_DELAY_S, 2.0 ** (in_a_row - 2)) if in_a_row >= 2 else 0.0
    if kind is FailureKind.START:
        used = counts.start_failures_in_a_row + 1
        counts = attrs.evolve(counts, start_failures_in_a_row=used)
        return NextStep(
            is_restart=used < MAX_START_FAILURES,
            counts=counts,
            reason=f"start-up failed {used} of at most {MAX_START_FAILURES} times in a row",
            delay_s=delay_s,
        )
    # The workers had started, so that start-ups are no longer failing in a row.
    counts = counts.after_start()
    if kind is FailureKind.PREEMPTION:
        used, limit, name = counts.preemptions + 1, config.max_preemption_failures, "max_preemption_failures"
        counts = attrs.evolve(counts, preemptions=used)
    else:
        used, limit, name = counts.failures + 1, config.max_failures, "max_failures"
        counts = attrs.evolve(counts, failures=used)
    is_restart = not config.fail_fast and (limit < 0 or used <= limit)
    allowed = "without limit" if limit < 0 else f"{name}={limit}"
    return NextStep(is_restart=is_restart, counts=counts, reason=f"failure {used} ({allowed})", delay_s=delay_s)


_CASCADE_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "application timeout caused pair closure",
    "store->get",
    "failed to connect to any address",
)


def is_cascade(type_name: str, message: str) -> bool:
    """Whether an exception looks like the echo of another rank's death.

    Source:
        What gloo, NCCL and ``TCPStore`` say when a peer goes away (torch 2.13).
    """
    if type_name in {
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "ConnectionResetError",
        "BrokenPipeError",
    }:
        return True
    text = message.lower()
    return any(sign in text for sign in _CASCADE_SIGNS)


def order_by_cause(failures: Sequence[tuple[int, str, str, float, bool]]) -> list[int]:
    """World ranks of failed workers, the likely culprit first.

    An exception of the user's own comes before the death of a process, and both before
    errors that only say that a peer is gone; among equals the earlier one, then the lower rank.

    Args:
        failures: ``(world_rank, type name, message, unix time, process died)`` each.
    """

    def key(failure: tuple[int, str, str, float, bool]) -> tuple[int, float, int]:
        rank, type_name, message, failed_at, has_died = failure
        if has_died:
            group = 1
        elif is_cascade(type_name, message):
            group = 2
        else:
            group = 0
        return (group, failed_at, rank)

    return [failure[0] for failure in sorted(failures, key=key)]
