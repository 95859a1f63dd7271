"""From ``report()`` to a record: number it, upload its files, hand the line on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigTypeError, UploadError
from ..storage.checkpoint import Checkpoint
from ..storage.store import RunStore
from .metrics import encode_metrics
from .outbox import RecordSink
from .records import Part, encode_report

__all__ = ["Reporter"]

logger = logging.getLogger("ray_lite.train")


class Reporter:
    """Numbers the reports of one rank and hands them on, in order.

    Args:
        store: Where the run lies.
        sink: Takes the records.
        attempt: This life of the worker group, >= 1.
        first_report_index: Number of the first report of this attempt, >= 0.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: RunStore,
        sink: RecordSink,
        *,
        attempt: int,
        first_report_index: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._sink, self._attempt, self._clock = store, sink, attempt, clock
        # Held over an upload too: a report of another thread gets the next number, and its place in the order.
        self._lock = threading.Lock()
        self._next_index = first_report_index
        self._warned_types: set[str] = set()
        self.newest_checkpoint: Checkpoint | None = None

    @property
    def num_reports(self) -> int:
        """The number that the next report of this rank gets."""
        return self._next_index

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
        """One report of this rank; returns when it is queued, and its files are durable.

        Raises:
            ConfigTypeError: ``metrics`` is not a mapping, or ``checkpoint`` not a Checkpoint.
            UploadError: The files could not be stored. The report still counts, without a
                checkpoint, so that the ranks stay in step, and the next one works as usual.
        """
        metrics_json, unstorable = encode_metrics(metrics)
        if unstorable:
            self._warn_once(unstorable)
        if checkpoint is None:
            with self._lock:
                record = encode_report(self._next_index, self._clock(), metrics_json)
                self._sink.add(record)
                self._next_index += 1
            return
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigTypeError(
                f"report(checkpoint=...) takes a ray_lite.train.Checkpoint, got {type(checkpoint).__name__}; "
                "wrap a folder with train.Checkpoint.from_directory(folder)"
            )
        with self._lock:
            self._report_with_files(metrics_json, checkpoint)

    def _report_with_files(self, metrics_json: str, checkpoint: Checkpoint) -> None:
        index = self._next_index
        failure: UploadError | None = None
        try:
            uploaded = self._store.upload(checkpoint, report_index=index, attempt=self._attempt)
            part = Part(uploaded=uploaded)
        except UploadError as error:
            failure, part = error, Part(failure=str(error))
        # Numbered even when the upload failed: the n-th reports of all ranks belong together.
        self._sink.add(encode_report(index, self._clock(), metrics_json, part))
        self._next_index += 1
        if failure is not None:
            raise failure
        self.newest_checkpoint = self._store.open_checkpoint_dir(uploaded.dir_name)

    def _warn_once(self, types: tuple[str, ...]) -> None:
        new = [name for name in types if name not in self._warned_types]
        if new:
            self._warned_types.update(new)
            logger.warning(
                "report() got values of type %s, which are no numbers, strings, lists or dicts; "
                "they are kept as their repr(). Convert them first, e.g. with .tolist() or .item()",
                ", ".join(new),
            )
