"""What a train function can learn about the end that others have planned for it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import attrs

__all__ = ["DEFAULT_GRACE_S", "Notices", "PreemptionInfo"]

_COMMON_MOMENT_S = 2.0
DEFAULT_GRACE_S = 25.0
"""Seconds that train functions get after a SIGTERM, where ``preemption_grace_s`` does not say: schedulers
(Kubernetes, Slurm, cloud providers) wait 30 s before they kill, and the end itself takes a moment too."""


@attrs.frozen(kw_only=True)
class PreemptionInfo:
    """Workers are about to be taken away.

    Attributes:
        deadline_ms: When, in milliseconds since the epoch; None when nobody has said.
        preempted_node_to_ranks: Ray's node id → world ranks on that node.
    """

    deadline_ms: int | None = None
    preempted_node_to_ranks: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)

    @property
    def preempted_node_ids(self) -> list[str]:
        """The nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The world ranks that will be lost, sorted."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})

    def seconds_left(self) -> float | None:
        """Seconds until the deadline, >= 0; None when there is none."""
        return None if self.deadline_ms is None else max(0.0, self.deadline_ms / 1_000 - time.time())


class Notices:
    """What the controller has told this worker; read by the train function, written by another thread.

    Without a lock: a signal handler may ask while the code that it has interrupted is asking. Each
    step assigns one name, in an order that suits a reader who comes at any moment.
    """

    def __init__(self) -> None:
        self._preemption: PreemptionInfo | None = None
        self._wants_checkpoint = self._was_told = False
        self._from_report, self._at_latest = 0, 0.0
        self.has_seen_preemption = False
        """Whether the train function has asked and was told: leaving early is then its answer."""

    def preempt(self, info: PreemptionInfo, from_report: int = 0) -> None:
        """Workers will be taken away; a second notice with an earlier deadline replaces the first.

        Args:
            info: Who, and when.
            from_report: As for ``ask_for_checkpoint``.
        """
        # In this order: whoever is asked for a checkpoint because of it finds it.
        self._preemption = info
        left = info.seconds_left()
        self._ask(from_report, _COMMON_MOMENT_S if left is None else min(_COMMON_MOMENT_S, left / 4))

    def ask_for_checkpoint(self, from_report: int = 0) -> None:
        """A checkpoint soon would save work: the group is about to change its size.

        Args:
            from_report: Number of the report before which all ranks are told, so that they answer in the same one.
                A rank that does not get there soon is told all the same.
        """
        self._ask(from_report, _COMMON_MOMENT_S)

    def _ask(self, from_report: int, at_latest_in_s: float) -> None:
        self._from_report, self._at_latest = from_report, time.monotonic() + at_latest_in_s
        self._was_told, self._wants_checkpoint = False, True

    def reported(self) -> None:
        """This rank has made a report, which is the answer if it was told before.

        With files or without: a rank that has none leaves them to another one, often rank 0, and the ranks should
        not go on with different answers. One that was not told yet, as the notice came while it was reporting, is
        still to be told: it may have to leave.
        """
        if self._was_told:
            self._wants_checkpoint = self._was_told = False

    @property
    def preemption(self) -> PreemptionInfo | None:
        """What is known, or None."""
        found = self._preemption
        if found is not None:
            self.has_seen_preemption = True
        return found

    def wants_checkpoint(self, num_reports: int) -> bool:
        """Whether a checkpoint was asked for, and no report has answered that since.

        Args:
            num_reports: Number of this rank's next report.
        """
        wants = self._wants_checkpoint and (
            self._was_told or num_reports >= self._from_report or time.monotonic() >= self._at_latest
        )
        if wants:
            self._was_told = True
            if self._preemption is not None:
                self.has_seen_preemption = True
        return wants
