"""The queue between ``report()`` and the controller: bounded, batched, journalled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import TrainError
from .beats import silent, wait_for
from .journal import Journal
from .naming import named

__all__ = ["Outbox", "RecordSink"]

logger = logging.getLogger("ray_lite.train")

_MAX_PENDING_BYTES = 8 << 20
_MAX_BATCH_BYTES = 2 << 20
_FULL_WARNING_S = 10.0
_RETRY_S = 60.0
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0


class RecordSink(Protocol):
    """Takes the records of one rank, in order."""

    def add(self, record: bytes) -> None:
        """Take one record; may block while the receiver is behind."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all records have arrived; False if they have not in time, or never will."""
        ...


class Outbox:
    """Sends records to the controller from a thread of its own.

    While one batch is on its way the next one gathers, so the batches grow with the load
    and a lone report leaves at once. A slow receiver makes ``add`` wait: memory stays
    bounded by ``max_pending_bytes``.

    Args:
        send: Delivers a batch: number of its first record (from 0), and the records. Returns
            when they have arrived. The same batch may come twice.
        journal: Where records are kept until they have arrived.
        max_pending_bytes: Bytes that may wait to be sent.
        is_temporary: Whether an exception of ``send`` may be over soon, as that of a network that
            is interrupted: the batch is sent again for up to a minute. Any other exception ends the outbox.
        beat: Gives a sign of life; called at least every second by whoever waits here.
        clock: Seconds, on any clock that only grows.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        send: Callable[[int, Sequence[bytes]], None],
        journal: Journal,
        *,
        max_pending_bytes: int = _MAX_PENDING_BYTES,
        is_temporary: Callable[[BaseException], bool] = lambda error: False,
        beat: Callable[[], None] = silent,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._send, self._journal, self._max_pending_bytes = send, journal, max_pending_bytes
        self._is_temporary, self._beat, self._clock, self._sleep = is_temporary, beat, clock, sleep
        self._changed = threading.Condition()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._num_added = self._num_arrived = 0
        self._is_idle = False
        self._is_closed = False
        self._journal_works = True
        self._journal_has_room = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ray_lite-reports", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """What ended the outbox before its time, or None."""
        return self._failure

    @property
    def num_added(self) -> int:
        """Records taken so far."""
        return self._num_added

    def add(self, record: bytes) -> None:
        """Keep a record and see that it is sent.

        Raises:
            TrainError: The outbox is closed, or records no longer reach the controller.
        """
        with self._changed:
            if self._pending_bytes >= self._max_pending_bytes:
                self._wait_for_room()
            self.check()
            if self._is_closed:
                raise TrainError("the train function has ended; a thread of it that still runs cannot report")
            self._write_journal(record)
            self._pending.append(record)
            self._pending_bytes += len(record)
            self._num_added += 1
            if self._is_idle:
                self._changed.notify_all()

    def check(self) -> None:
        """Say so if records no longer reach the controller.

        Raises:
            TrainError: They do not, and will not again; names the cause.
        """
        if self._failure is not None:
            raise TrainError(
                f"the reports of this worker no longer reach the controller: {named(self._failure)}; "
                "what has become of the run stands in the output of the driver"
            ) from self._failure

    def flush(self, timeout_s: float) -> bool:
        """Wait until every record has arrived.

        Args:
            timeout_s: Seconds to wait, >= 0.

        Returns:
            Whether all have arrived. False at once when they never will, see ``check``.
        """
        with self._changed:
            target = self._num_added
            wait_for(
                self._changed,
                lambda: self._num_arrived >= target or self._failure is not None,
                timeout_s,
                self._beat,
            )
            return self._num_arrived >= target

    def close(self, timeout_s: float) -> bool:
        """Refuse further records, send the rest and end the thread.

        Returns:
            Whether all records have arrived.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            # The thread may still be at it, and must not begin a segment that nobody closes.
            self._journal.close()
            return self._num_arrived == self._num_added

    def _wait_for_room(self) -> None:
        def has_room() -> bool:
            return self._pending_bytes < self._max_pending_bytes or self._failure is not None or self._is_closed

        while not wait_for(self._changed, has_room, _FULL_WARNING_S, self._beat):
            logger.warning(
                "report() is waiting: %d bytes of reports are queued, and the controller took none for %g s",
                self._pending_bytes,
                _FULL_WARNING_S,
            )

    def _write_journal(self, record: bytes) -> None:
        if not self._journal_works:
            return
        try:
            self._journal.append(record)
        except OSError as error:
            # A full temporary disk costs the protection, not the run.
            self._journal_works = False
            logger.warning(
                "the journal of this worker cannot be written (%s): reports that are under way "
                "would be lost if this process were killed; free space in the temporary folder",
                error,
            )

    def _acknowledge(self) -> None:
        if not self._journal_works:
            return
        try:
            self._journal.acknowledge(self._num_arrived)
        except OSError as error:
            if self._journal_has_room:
                logger.warning(
                    "the journal of this worker cannot be trimmed and grows (%s): if its folder "
                    "was removed, reports that are under way would be lost if this process were killed; else close "
                    "files, or free space in the temporary folder",
                    error,
                )
            self._journal_has_room = False
        else:
            self._journal_has_room = True

    def _run(self) -> None:
        try:
            self._send_all()
        # Whatever it is, callers of report() are told, those that wait for room too: nobody sends any more.
        except BaseException as error:  # noqa: BLE001
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _send_all(self) -> None:
        """Send what comes until the outbox is closed and empty."""
        while True:
            with self._changed:
                while not self._pending:
                    if self._is_closed:
                        return
                    self._is_idle = True
                    self._changed.wait()
                self._is_idle = False
                batch = self._take_batch()
                first = self._num_arrived
            self._deliver(first, batch)
            with self._changed:
                self._num_arrived += len(batch)
                # Before the journal: whatever becomes of that, these have arrived.
                self._changed.notify_all()
                self._acknowledge()

    def _deliver(self, first: int, batch: Sequence[bytes]) -> None:
        """Send one batch, again and again while what hinders it is temporary."""
        gives_up_at: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                self._send(first, batch)
            except BaseException as error:
                if not self._is_temporary(error):
                    raise
                if gives_up_at is None:
                    gives_up_at = self._clock() + _RETRY_S
                    logger.warning(
                        "the reports of this worker do not reach the controller for now (%s); they wait, and are "
                        "sent again for %g s",
                        named(error),
                        _RETRY_S,
                    )
                if self._clock() + pause_s > gives_up_at:
                    raise
            else:
                return
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _take_batch(self) -> list[bytes]:
        size = count = 0
        for record in self._pending:
            if count and size + len(record) > _MAX_BATCH_BYTES:
                break
            size += len(record)
            count += 1
        batch, self._pending = self._pending[:count], self._pending[count:]
        self._pending_bytes -= size
        return batch
