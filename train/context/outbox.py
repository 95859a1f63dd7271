"""The queue between ``report()`` and the controller: bounded, batched, journalled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import TrainError
from .journal import Journal

__all__ = ["Outbox", "RecordSink"]

logger = logging.getLogger("ray_lite.train")

_MAX_PENDING_BYTES = 8 << 20
_MAX_BATCH_BYTES = 2 << 20
_FULL_WARNING_S = 10.0


class RecordSink(Protocol):
    """Takes the records of one rank, in order."""

    def add(self, record: bytes) -> None:
        """Take one record; may block while the receiver is behind."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all records have arrived; False if they have not in time."""
        ...


class Outbox:
    """Sends records to the controller from a thread of its own.

    While one batch is on its way the next one gathers, so the batches grow with the load
    and a lone report leaves at once. A slow receiver makes ``add`` wait: memory stays
    bounded by ``max_pending_bytes``.

    Args:
        send: Delivers a batch: number of its first record (from 0), and the records. Returns
            when they have arrived; an exception from it ends the outbox.
        journal: Where records are kept until they have arrived.
        max_pending_bytes: Bytes that may wait to be sent.
    """

    def __init__(
        self,
        send: Callable[[int, Sequence[bytes]], None],
        journal: Journal,
        *,
        max_pending_bytes: int = _MAX_PENDING_BYTES,
    ) -> None:
        self._send, self._journal, self._max_pending_bytes = send, journal, max_pending_bytes
        self._changed = threading.Condition()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._num_added = self._num_arrived = 0
        self._is_idle = False
        self._is_closed = False
        self._journal_works = True
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
            TrainError: The outbox is closed, or the controller is gone.
        """
        with self._changed:
            while self._pending_bytes >= self._max_pending_bytes and self._failure is None and not self._is_closed:
                if not self._changed.wait(_FULL_WARNING_S):
                    logger.warning(
                        "report() is waiting: %d bytes of reports are queued, and the controller took none for %g s",
                        self._pending_bytes,
                        _FULL_WARNING_S,
                    )
            if self._failure is not None:
                raise TrainError(f"the controller of this run is gone ({self._failure}); this worker cannot report")
            if self._is_closed:
                raise TrainError("the train function has ended; a thread of it that still runs cannot report")
            self._write_journal(record)
            self._pending.append(record)
            self._pending_bytes += len(record)
            self._num_added += 1
            if self._is_idle:
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every record has arrived.

        Args:
            timeout_s: Seconds to wait, >= 0.

        Returns:
            Whether all have arrived.
        """
        with self._changed:
            target = self._num_added
            return (
                self._changed.wait_for(lambda: self._num_arrived >= target or self._failure is not None, timeout_s)
                and self._num_arrived >= target
            )

    def close(self, timeout_s: float) -> bool:
        """Refuse further records, send the rest and end the thread.

        Returns:
            Whether all records have arrived.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._journal.close()
        return self._num_arrived == self._num_added

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

    def _run(self) -> None:
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
            try:
                self._send(first, batch)
            # Whatever ended the connection is told to the next caller of report().
            except BaseException as error:  # noqa: BLE001
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._num_arrived += len(batch)
                if self._journal_works:
                    self._journal.acknowledge(self._num_arrived)
                self._changed.notify_all()

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
