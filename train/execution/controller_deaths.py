"""What follows the death of a controller. Pure."""

from __future__ import annotations

import attrs

__all__ = ["ControllerDeaths"]

_MAX_WITHOUT_ATTEMPT = 3
_MAX_DELAY_S = 60.0


@attrs.frozen(kw_only=True)
class ControllerDeaths:
    """How often the controller of a run has died.

    Attributes:
        total: All deaths.
        without_attempt: Of the last ones in a row, those before any attempt had started.
        without_checkpoint: Of the last ones in a row, those with no checkpoint in between.
    """

    total: int = 0
    without_attempt: int = 0
    without_checkpoint: int = 0

    def one_more(self, *, has_started: bool, has_committed: bool) -> ControllerDeaths:
        """Count a death.

        Args:
            has_started: An attempt has started since the one before.
            has_committed: A checkpoint was committed since the one before.
        """
        return ControllerDeaths(
            total=self.total + 1,
            without_attempt=0 if has_started else self.without_attempt + 1,
            without_checkpoint=0 if has_committed else self.without_checkpoint + 1,
        )

    def may_restart(self, limit: int) -> bool:
        """Whether another controller may start; ``limit`` as ``FailureConfig.controller_failure_limit``."""
        return self.without_attempt < _MAX_WITHOUT_ATTEMPT and (limit < 0 or self.total <= limit)

    @property
    def delay_s(self) -> float:
        """Seconds to wait first: from the second death in a row that got nowhere, doubling up to a minute."""
        return min(_MAX_DELAY_S, 2.0 ** (self.without_checkpoint - 2)) if self.without_checkpoint > 1 else 0.0
