"""What goes on behind ``report()``: one thread, in order, bounded."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ..errors import TrainError

__all__ = ["UploadQueue"]

logger = logging.getLogger("ray_lite.train")

_MAX_WAITING = 2
_FULL_WARNING_S = 30.0


class UploadQueue:
    """Runs jobs one after the other in a thread of its own, which lives only while there are any.

    A job that fails does not stop the next one; its error waits until somebody takes it.

    Args:
        max_waiting: Jobs that may wait behind the one that runs; one more makes ``add`` wait.
    """

    def __init__(self, *, max_waiting: int = _MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_running = 0
        self._failures: list[Exception] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def num_pending(self) -> int:
        """Jobs that have not ended yet."""
        with self._changed:
            return len(self._waiting) + self._num_running

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job; while too many wait, so does the caller.

        Raises:
            TrainError: The queue was closed.
        """
        with self._changed:
            if self._is_closed:
                raise TrainError("the train function has ended; a thread of it that still runs cannot report")
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray_lite-uploads", daemon=True)
                self._thread.start()
            while len(self._waiting) > self._max_waiting and not self._is_closed:
                if not self._changed.wait(_FULL_WARNING_S):
                    logger.warning(
                        "report() is waiting: %d checkpoints of this worker wait for the storage, which is slower "
                        "than they come; report fewer of them",
                        len(self._waiting),
                    )

    def take_failures(self) -> list[Exception]:
        """Errors of jobs that nobody has taken yet, oldest first."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended; False if they have not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._num_running, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs and wait for those that are there.

        Jobs that have not begun after ``timeout_s`` never will.

        Returns:
            Whether all have ended.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        has_ended = self.wait(timeout_s)
        with self._changed:
            self._waiting.clear()
            thread = self._thread
        if has_ended and thread is not None and thread is not threading.current_thread():
            thread.join()
        return has_ended

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._waiting.popleft()
                self._num_running = 1
                self._changed.notify_all()
            failure: Exception | None = None
            try:
                job()
            # Whatever it is, the train function is told; the next job may do better.
            except Exception as error:  # noqa: BLE001
                failure = error
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                self._num_running = 0
                self._changed.notify_all()
