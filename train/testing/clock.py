"""A clock that moves only when told to."""

from __future__ import annotations

import threading

__all__ = ["ManualClock"]


class ManualClock:
    """Stands in for ``time.time``, ``time.monotonic`` and ``time.sleep`` in tests.

    Sleeping moves the clock instead of waiting, so a test of an hour of retries takes no time::

        clock = ManualClock()
        policy = RetryPolicy(sleep=clock.sleep)
        ...
        assert clock.slept_s == [0.1, 0.2]

    Args:
        start_s: What the clock shows at first.
    """

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()
        self.slept_s: list[float] = []
        """Every sleep asked for, in order."""

    def __call__(self) -> float:
        return self.now()

    def now(self) -> float:
        """Seconds that the clock shows."""
        with self._lock:
            return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds``, >= 0."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back: seconds must be >= 0, got {seconds}")
        with self._lock:
            self._now_s += seconds

    def sleep(self, seconds: float) -> None:
        """Return at once; the clock shows ``seconds`` more."""
        self.slept_s.append(seconds)
        self.advance(max(0.0, seconds))
