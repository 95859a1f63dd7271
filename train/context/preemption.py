"""What a train function can learn about the end that others have planned for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import attrs

__all__ = ["Notices", "PreemptionInfo"]


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
    """What the controller has told this worker; read by the train function, written by another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preemption: PreemptionInfo | None = None
        self._wants_checkpoint = False
        self.has_seen_preemption = False
        """Whether the train function has asked and was told: leaving early is then its answer."""

    def preempt(self, info: PreemptionInfo) -> None:
        """Workers will be taken away; a second notice with an earlier deadline replaces the first."""
        with self._lock:
            self._preemption = info
            self._wants_checkpoint = True

    def ask_for_checkpoint(self) -> None:
        """A checkpoint soon would save work: the group is about to change its size."""
        with self._lock:
            self._wants_checkpoint = True

    def checkpoint_reported(self) -> None:
        """This rank has reported a checkpoint."""
        with self._lock:
            self._wants_checkpoint = False

    @property
    def preemption(self) -> PreemptionInfo | None:
        """What is known, or None."""
        with self._lock:
            if self._preemption is not None:
                self.has_seen_preemption = True
            return self._preemption

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for and has not been reported since."""
        with self._lock:
            if self._wants_checkpoint and self._preemption is not None:
                self.has_seen_preemption = True
            return self._wants_checkpoint
