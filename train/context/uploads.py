"""What goes on behind ``report()``: one thread, in order, bounded."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ..errors import TrainError, UploadError
from .beats import silent, wait_for
from .naming import named

__all__ = ["UploadQueue"]

logger = logging.getLogger("ray_lite.train")

_MAX_WAITING = 2
_FULL_WARNING_S = 30.0


class UploadQueue:
    """Runs jobs one after the other in a thread of its own, which lives only while there are any.

    A job that fails does not stop the next one; its error waits until somebody takes it.

    Args:
        max_waiting: Jobs that may wait behind the one that runs; one more makes ``add`` wait.
        beat: Gives a sign of life; called at least every second by whoever waits here, not by the jobs.
    """

    def __init__(self, *, max_waiting: int = _MAX_WAITING, beat: Callable[[], None] = silent) -> None:
        self._max_waiting, self._beat = max_waiting, beat
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_running = 0
        self._failures: list[Exception] = []
        self._is_closed = False
        self._runner: threading.Thread | None = None
        self._thread: threading.Thread | None = None

    @property
    def num_pending(self) -> int:
        """Jobs that have not ended yet."""
        with self._changed:
            return len(self._waiting) + self._num_running

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job; while too many wait, so does the caller.

        Raises:
            TrainError: The queue was closed, or a job adds another one.
        """
        self.refuse_jobs()
        with self._changed:
            if self._is_closed:
                raise TrainError("the train function has ended; a thread of it that still runs cannot report")
            self._waiting.append(job)
            runs_here = self._runner is None and not self._start_thread()
            if runs_here:
                self._runner = threading.current_thread()
            else:
                while not wait_for(self._changed, self._has_room, _FULL_WARNING_S, self._beat):
                    logger.warning(
                        "report() is waiting: %d checkpoints of this worker wait for the storage, which is slower "
                        "than they come; report fewer of them",
                        len(self._waiting),
                    )
        if runs_here:
            self._run()

    def refuse_jobs(self) -> None:
        """Refuse a call that may wait for the queue where it comes from a job, for which the queue waits.

        Raises:
            TrainError: This thread runs the jobs.
        """
        if self._runner is not None and self._runner is threading.current_thread():
            raise TrainError(
                "a checkpoint_upload_fn can neither report nor wait for checkpoints while it uploads one; "
                "return from it, and report from the training loop"
            )

    def take_failures(self) -> list[Exception]:
        """Errors of jobs that nobody has taken yet, oldest first."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended; False if they have not in time.

        Raises:
            TrainError: A job waits for itself.
        """
        self.refuse_jobs()
        with self._changed:
            return wait_for(self._changed, lambda: not self._waiting and not self._num_running, timeout_s, self._beat)

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
        if has_ended and thread is not None:
            thread.join()
        return has_ended

    def _has_room(self) -> bool:
        return len(self._waiting) <= self._max_waiting or self._is_closed

    def _start_thread(self) -> bool:
        """Begin to run the jobs behind the scenes; False where the system gives no more threads.

        Then the caller runs them: a queue that nobody works on would be waited for for ever.
        """
        thread = threading.Thread(target=self._run, name="ray_lite-uploads", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("report() uploads by itself, no thread can be started for it: %s", error)
            return False
        self._runner = self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._runner = self._thread = None
                    return
                job = self._waiting.popleft()
                self._num_running = 1
                self._changed.notify_all()
            failure: Exception | None = None
            try:
                job()
            # Whatever it is, the train function is told; the next job may do better. SystemExit too: it would
            # end this thread alone, in silence, and leave a job that counts as running for ever.
            except BaseException as error:  # noqa: BLE001
                if isinstance(error, Exception):
                    failure = error
                else:
                    failure = UploadError(f"an upload ended with {named(error)}")
                    failure.__cause__ = error
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                self._num_running = 0
                self._changed.notify_all()
