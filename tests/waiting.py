"""Wait for a condition: the tests' only way to wait for something they cannot be told about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Return as soon as ``condition()`` is true; fail with ``what`` after ``timeout_s``."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        pause.wait(0.01)
