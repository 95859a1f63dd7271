"""What ``get_all_reported_checkpoints`` gives."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..storage.checkpoint import Checkpoint

__all__ = ["CheckpointConsistencyMode", "ReportedCheckpoint", "ReportedCheckpointStatus"]


class CheckpointConsistencyMode(Enum):
    """What ``get_all_reported_checkpoints`` waits for.

    Source:
        ``ray.train.CheckpointConsistencyMode``, with the same names and values.
    """

    COMMITTED = "COMMITTED"
    """Until every checkpoint that this rank has reported is committed, or known to have failed."""
    VALIDATED = "VALIDATED"
    """The same as COMMITTED: there are no validation tasks."""

    @classmethod
    def of(cls, value: Any) -> CheckpointConsistencyMode:
        """The member that a caller means.

        Raises:
            ConfigError: There is none.
        """
        try:
            return cls(getattr(value, "value", value))
        except ValueError:
            names = ", ".join(f"CheckpointConsistencyMode.{member.name}" for member in cls)
            raise ConfigError(f"consistency_mode must be one of {names}, got {value!r}") from None


class ReportedCheckpointStatus(Enum):
    """How far a reported checkpoint has come."""

    COMMITTED = "COMMITTED"
    """It is in storage for good."""


@attrs.frozen(kw_only=True)
class ReportedCheckpoint:
    """A committed checkpoint of the run that is still kept.

    Attributes:
        checkpoint: Its files.
        metrics: What was reported with it.
        status: How far it has come.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED
