"""Signs of life while a call waits for storage or for the controller: a long upload is no hang."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["beating", "silent", "wait_for"]

_BEAT_S = 1.0


def silent() -> None:
    """The beat of a worker for whose signs of life nobody looks."""


def wait_for(
    changed: threading.Condition, is_so: Callable[[], bool], timeout_s: float | None, beat: Callable[[], None]
) -> bool:
    """``changed.wait_for(is_so, timeout_s)`` that beats at least every second.

    Args:
        changed: Held by the caller.
        is_so: What is waited for.
        timeout_s: Seconds to wait at most, >= 0; None: as long as it takes.
        beat: Called while the lock is held, so it must be quick.

    Returns:
        What ``is_so`` said last.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not is_so():
        beat()
        left = _BEAT_S if deadline is None else min(_BEAT_S, deadline - time.monotonic())
        if left <= 0:
            return False
        changed.wait(left)
    return True


@contextlib.contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Beat every second, from a thread, for as long as the ``with`` block runs.

    For calls into storage drivers and user code, which beat by themselves nowhere. A call that
    never ends is therefore never taken for a hang.
    """
    if beat is silent:
        yield
        return
    has_ended = threading.Event()

    def go_on() -> None:
        while not has_ended.wait(_BEAT_S):
            beat()

    beat()
    thread = threading.Thread(target=go_on, name="ray_lite-beats", daemon=True)
    try:
        # Inside: an exception from a signal handler must not leave a thread that hides every later hang.
        with contextlib.suppress(RuntimeError):  # the system gives no more threads: better a silent upload than none
            thread.start()
        yield
    finally:
        has_ended.set()
        if thread.ident is not None:
            thread.join()
