"""The history of a run: one JSON line for every report, written as it comes.

A line is ``{"i": report index, "t": seconds since the epoch, "m": metrics}``, of rank 0. Once the
other ranks have made that report too, ``{"i": ..., "a": numbers over the ranks}`` may follow. On a disk each
attempt appends to one file. Object stores cannot append, so there an attempt writes segments,
by size and by time, each an object of its own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs

from ..errors import StorageError
from .files import Files

__all__ = ["HISTORY_FOLDER", "FileHistoryWriter", "HistoryRow", "HistoryWriter", "SegmentHistoryWriter", "read_rows"]

logger = logging.getLogger(__name__)

HISTORY_FOLDER = "metrics"

_FILE_NAME = re.compile(r"^attempt_(\d+)(?:_(\d+))?\.jsonl$")


@attrs.frozen
class HistoryRow:
    """One report."""

    report_index: int
    time: float
    """Seconds since the epoch."""
    metrics: dict[str, Any]
    attempt: int
    over_ranks: dict[str, float] = attrs.field(factory=dict)
    """``"loss/mean"`` and the like, where the run was asked for them."""


class HistoryWriter(Protocol):
    """Where the reports of one attempt go. Used by one thread at a time."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Add complete JSON lines, each without its newline."""

    def flush(self) -> None:
        """Try to store everything appended so far; what cannot be stored is kept and tried again."""

    def close(self) -> None:
        """Store everything and end. Raises StorageError when something could not be stored."""


class FileHistoryWriter:
    """Appends to a local file; what was appended survives the death of this process.

    When the disk refuses (it is full, say), lines wait in memory and go first the next time.

    Args:
        path: The file; made with its folder at the first line.
        max_waiting_bytes: While the disk refuses, further lines beyond this are dropped.
    """

    def __init__(self, path: str, *, max_waiting_bytes: int = 256 << 20) -> None:
        self._path = path
        self._max_waiting_bytes = max_waiting_bytes
        self._num_dropped = 0
        self._waiting: deque[bytes] = deque()
        self._failed: OSError | None = None
        self._fd: int | None = None

    def append(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        if self._failed is not None and sum(map(len, self._waiting)) > self._max_waiting_bytes:
            self._num_dropped += len(lines)
        else:
            self._waiting.append(b"\n".join(lines) + b"\n")
        self.flush()

    def flush(self) -> None:
        try:
            while self._waiting:
                data = self._waiting[0]
                written = os.write(self._open(), data)
                # A part may be taken before the disk is full: go on from that very byte.
                self._waiting[0] = data[written:]
                if not self._waiting[0]:
                    self._waiting.popleft()
            self._failed = None
        except OSError as error:
            if self._failed is None:
                logger.warning("history %s cannot be written now, its lines wait in memory: %s", self._path, error)
            self._failed = error

    def close(self) -> None:
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        lost = self._num_dropped + sum(data.count(b"\n") for data in self._waiting)
        if lost:
            raise StorageError(f"{lost} lines of history could not be stored in {self._path}: {self._failed}")

    def _open(self) -> int:
        if self._fd is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            end = os.lseek(self._fd, 0, os.SEEK_END)
            if end and os.pread(self._fd, 1, end - 1) != b"\n":
                # A killed process left half a line; close it off, so that it spoils no other.
                os.write(self._fd, b"\n")
        return self._fd


class SegmentHistoryWriter:
    """Writes segments from a thread of its own, so that a slow store never slows the reports.

    A killed process loses what it appended in the last ``interval_s`` seconds; call ``flush``
    before a commit, so that no checkpoint is ahead of the history.

    Args:
        files: Where the run lies.
        prefix: Path of the segments without number and ending.
        interval_s: Lines wait at most this long.
        max_segment_bytes: A segment is written as soon as it is this large.
        max_waiting_bytes: While the store refuses, the oldest lines beyond this are dropped.
    """

    def __init__(
        self,
        files: Files,
        prefix: str,
        *,
        interval_s: float = 10.0,
        max_segment_bytes: int = 1 << 20,
        max_waiting_bytes: int = 256 << 20,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._prefix = prefix
        self._interval_s = interval_s
        self._max_segment_bytes = max_segment_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._now = now
        self._next_segment = 0
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._num_dropped = 0
        self._failed: Exception | None = None
        self._is_closed = False
        # Guards the lines; and one write at a time, so that segments keep their order.
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def append(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        with self._changed:
            self._lines.extend(lines)
            self._waiting_bytes += sum(map(len, lines)) + len(lines)
            if self._waiting_bytes > self._max_waiting_bytes:
                self._drop_oldest()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray_lite-history", daemon=True)
                self._thread.start()
            if self._waiting_bytes >= self._max_segment_bytes:
                self._changed.notify()

    def flush(self) -> None:
        with self._writing:
            with self._changed:
                lines, size = self._lines, self._waiting_bytes
                self._lines, self._waiting_bytes = [], 0
            if not lines:
                return
            path = f"{self._prefix}_{self._next_segment:06d}.jsonl"
            try:
                self._files.write(path, b"\n".join(lines) + b"\n")
            except Exception as error:  # noqa: BLE001  # whatever it is, the lines are kept and training goes on
                if self._failed is None:
                    logger.warning("history %s cannot be written now, its lines wait in memory: %s", path, error)
                self._failed = error
                with self._changed:
                    self._lines, self._waiting_bytes = lines + self._lines, size + self._waiting_bytes
                return
            self._failed = None
            self._next_segment += 1

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.flush()
        if self._lines or self._num_dropped:
            lost = len(self._lines) + self._num_dropped
            raise StorageError(f"{lost} lines of history could not be stored in {self._prefix}*: {self._failed}")

    def _run(self) -> None:
        due = self._now() + self._interval_s
        while True:
            with self._changed:
                # While the store refuses, only time brings the next try.
                is_full = self._failed is None and self._waiting_bytes >= self._max_segment_bytes
                if not self._is_closed and not is_full:
                    self._changed.wait(max(0.0, due - self._now()))
                if self._is_closed:
                    return
                is_due = self._now() >= due or (self._failed is None and self._waiting_bytes >= self._max_segment_bytes)
            if is_due:
                self.flush()
                due = self._now() + self._interval_s

    def _drop_oldest(self) -> None:
        if not self._num_dropped:
            logger.warning(
                "history %s*: the store refuses, and memory is full; the oldest lines are lost", self._prefix
            )
        keep, size = len(self._lines), 0
        while keep > 0 and size + len(self._lines[keep - 1]) + 1 <= self._max_waiting_bytes // 2:
            keep -= 1
            size += len(self._lines[keep]) + 1
        self._num_dropped += keep
        self._lines, self._waiting_bytes = self._lines[keep:], size


def history_names(names: Iterable[str]) -> list[tuple[int, int, str]]:
    """Attempt, segment and name of the history files among ``names``, in the order they were written."""
    found = []
    for name in names:
        match = _FILE_NAME.match(name)
        if match:
            found.append((int(match.group(1)), int(match.group(2) or 0), name))
    return sorted(found)


def read_rows(parts: Iterable[tuple[int, bytes]]) -> list[HistoryRow]:
    """The history of a run from the content of its files.

    A later attempt begins again after the checkpoint it started from, so its rows replace those
    of earlier attempts from its first index on. A line that is cut short is left out.

    Args:
        parts: Attempt and content, in the order they were written.
    """
    rows: list[HistoryRow] = []
    current: int | None = None
    first = 0
    num_bad = 0
    for attempt, data in parts:
        for line in data.split(b"\n"):
            if not line:
                continue
            row = _parse(line, attempt)
            if row is None:
                num_bad += 1
                continue
            if isinstance(row, _OverRanks):
                # Reports of an attempt are numbered without gaps.
                position = first + row.report_index - rows[first].report_index if attempt == current else len(rows)
                if first <= position < len(rows) and rows[position].report_index == row.report_index:
                    rows[position].over_ranks.update(row.values)
                continue
            if attempt != current:
                current = attempt
                rows = [earlier for earlier in rows if earlier.report_index < row.report_index]
                first = len(rows)
            rows.append(row)
    if num_bad:
        logger.warning("history: %d lines are damaged or cut short and were left out", num_bad)
    return rows


@attrs.frozen
class _OverRanks:
    report_index: int
    values: dict[str, float]


def _parse(line: bytes, attempt: int) -> HistoryRow | _OverRanks | None:
    try:
        value = json.loads(line)
        if "a" in value:
            return _OverRanks(int(value["i"]), dict(value["a"]))
        return HistoryRow(int(value["i"]), float(value["t"]), dict(value["m"]), attempt)
    except (ValueError, TypeError, KeyError):
        return None
