"""The history of a run: one JSON line for every report, written as it comes.

A line is ``{"i": report index, "t": seconds since the epoch, "m": metrics}``, of rank 0. Once the
other ranks have made that report too, ``{"i": ..., "a": numbers over the ranks}`` may follow. On a disk each
attempt appends to one file. Object stores cannot append, so there an attempt writes segments,
by size and by time, each an object of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs

from .files import Files

__all__ = [
    "HISTORY_FOLDER",
    "FileHistoryWriter",
    "HistoryRow",
    "HistoryWriter",
    "SegmentHistoryWriter",
    "Unstored",
    "read_rows",
    "rescue",
]

logger = logging.getLogger(__name__)

HISTORY_FOLDER = "metrics"

# Where a disk refuses, this much is copied for each try.
_MAX_WRITE_BYTES = 256 << 10
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


@attrs.frozen(kw_only=True)
class Unstored:
    """What the storage lacks of a history, once its writer is closed.

    Attributes:
        lines: Lines that nothing but this object holds, each with its line break.
        file_name: Stored under this name in ``HISTORY_FOLDER``, they are read in the right place.
        reason: Why the storage refused them.
        lost: How many other lines are nowhere any more, and why; empty when there are none.
    """

    lines: bytes
    file_name: str
    reason: str
    lost: str

    @property
    def num_lines(self) -> int:
        """How many there are in ``lines``."""
        return self.lines.count(b"\n")

    @property
    def first_report_index(self) -> int:
        """Number of the first report in ``lines``, which must not be empty."""
        return int(json.loads(self.lines[: self.lines.index(b"\n")])["i"])


def rescue(unstored: Unstored, folder: str, roots: Iterable[str]) -> str:
    """Write lines that their storage refused to a file elsewhere.

    Args:
        folder: Relative path of a folder of this run alone; made.
        roots: Where it may lie; the first that takes the file is used.

    Returns:
        Path of the file.

    Raises:
        OSError: None takes it; says what each answered.
    """
    refused = []
    for root in roots:
        path = os.path.join(root, folder, unstored.file_name)
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(path, "wb") as file:
                file.write(unstored.lines)
        except OSError as error:
            refused.append(f"{root}: {error}")
            # A part would be taken for the whole.
            with contextlib.suppress(OSError):
                os.unlink(path)
        else:
            return path
    raise OSError("; ".join(refused))


class HistoryWriter(Protocol):
    """Where the reports of one attempt go. Used by one thread at a time."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Add complete JSON lines, each without its newline."""

    def flush(self) -> None:
        """Try to store everything appended so far; what cannot be stored is kept and tried again."""

    def close(self) -> Unstored | None:
        """Store everything and end.

        Returns:
            What is not stored, for the caller to look after; None when nothing is missing, and at a second call.
        """


class FileHistoryWriter:
    """Appends to a local file; what was appended survives the death of this process.

    When the disk refuses (it is full, say), lines wait in memory and go first the next time. When
    the file is removed under its hands, it is made again with all it held: what is open can be read.

    Args:
        path: The file, ``attempt_<n>.jsonl``; made with its folder at the first line.
        max_waiting_bytes: While the disk refuses, further lines beyond this are dropped.
        look_interval_s: ``append`` looks this often whether the file is still there (``flush`` always): to look
            costs more than to write, and what goes to a removed file meanwhile can be read as well.
    """

    def __init__(
        self,
        path: str,
        *,
        max_waiting_bytes: int = 256 << 20,
        look_interval_s: float = 0.5,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._max_waiting_bytes = max_waiting_bytes
        self._look_interval_s = look_interval_s
        self._now = now
        self._next_look = 0.0
        # Whole lines; of the first, the file may hold some bytes already.
        self._waiting = bytearray()
        self._num_taken = 0
        # What the file should hold: lines, and bytes with a part of a line.
        self._num_stored = self._size = 0
        self._num_removed = self._num_dropped = 0
        # Text: the exception itself would keep the frames it came through.
        self._refusal = ""
        self._fd: int | None = None
        self._identity: tuple[int, int] | None = None

    def append(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        if self._refusal and len(self._waiting) > self._max_waiting_bytes:
            if not self._num_dropped:
                logger.warning("history %s: memory for lines that wait is full; further ones are lost", self._path)
            self._num_dropped += len(lines)
        else:
            self._waiting += b"\n".join(lines) + b"\n"
        self._write(must_look=self._now() >= self._next_look)

    def flush(self) -> None:
        self._write(must_look=True)

    def _write(self, *, must_look: bool) -> None:
        try:
            if must_look:
                self._next_look = self._now() + self._look_interval_s
                self._look()
            while self._waiting:
                fd = self._open()
                # A part may be taken before the disk is full: go on from that very byte.
                written = os.write(fd, self._waiting[self._num_taken : self._num_taken + _MAX_WRITE_BYTES])
                self._size += written
                self._num_taken += written
                end = self._waiting.rfind(b"\n", 0, self._num_taken) + 1
                self._num_stored += self._waiting.count(b"\n", 0, end)
                self._num_taken -= end
                del self._waiting[:end]
            self._refusal = ""
        except OSError as error:
            if not self._refusal:
                logger.warning("history %s cannot be written now, its lines wait in memory: %s", self._path, error)
            self._refusal = str(error)

    def close(self) -> Unstored | None:
        self.flush()
        is_sure = self._fd is not None
        if self._fd is not None:
            fd, self._fd = self._fd, None
            if self._num_taken:
                # The whole line is handed back; beside it, half of it would be a damaged line for ever.
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, self._size - self._num_taken)
            try:
                os.close(fd)
            except OSError as error:
                # Some network filesystems say only here that they had no space for what they took.
                self._refusal, is_sure = str(error), False
        if self._num_stored and not is_sure:
            self._num_removed += max(0, self._num_stored - _lines_at(self._path))
        lost = _describe_lost(self._num_removed, self._num_dropped, self._max_waiting_bytes)
        lines, self._waiting, self._num_taken = bytes(self._waiting), bytearray(), 0
        self._num_stored = self._num_removed = self._num_dropped = 0
        if not lines and not lost:
            return None
        # Named like a segment that follows the file: to put it back is to copy it, and twice does no harm.
        name = f"{os.path.basename(self._path).removesuffix('.jsonl')}_000001.jsonl"
        return Unstored(lines=lines, file_name=name, reason=self._refusal, lost=lost)

    def _look(self) -> None:
        """Notice that the path no longer names the open file, or that this one has been cut."""
        if self._fd is None or self._identity is None:
            return
        is_missing = False
        try:
            is_named = _identity(os.stat(self._path)) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            is_missing = True
        except PermissionError:
            # The folder may no longer be looked into; the file that is open can still be written.
            return
        else:
            opened = self._status()
            if is_named and opened is not None and self._is_ours(opened) and opened.st_size >= self._size:
                return
        self._begin_anew(is_missing=is_missing)

    def _status(self) -> os.stat_result | None:
        """Of the open file; None when it cannot be told: removed on the server, say, or closed by user code."""
        assert self._fd is not None
        try:
            return os.fstat(self._fd)
        except OSError:
            return None

    def _is_ours(self, opened: os.stat_result) -> bool:
        # User code may have closed all files; the number then soon means one of its own.
        return _identity(opened) == self._identity

    def _begin_anew(self, *, is_missing: bool) -> None:
        assert self._fd is not None
        opened, held = self._status(), b""
        if opened is None or self._is_ours(opened):
            with contextlib.suppress(OSError):
                if is_missing and opened is not None and opened.st_size <= self._max_waiting_bytes:
                    held = _read_all(self._fd)
                    # Half a line at its end waits as a whole one.
                    held = held[: held.rfind(b"\n") + 1]
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = None
        self._waiting[:0] = held
        self._num_taken = 0
        self._num_stored -= held.count(b"\n")
        num_before = self._num_removed
        self._open()
        num_removed = self._num_removed - num_before
        logger.warning(
            "history %s was removed, replaced or cut while the run goes on; %s, and it goes on in a file of that name",
            self._path,
            f"{num_removed} lines that it held are lost" if num_removed else "nothing is lost",
        )

    def _open(self) -> int:
        if self._fd is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                num_found = _read_all(fd).count(b"\n")
                size = os.lseek(fd, 0, os.SEEK_END)
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    # A killed process left half a line; close it off, so that it spoils no other.
                    size += os.write(fd, b"\n")
                identity = _identity(os.fstat(fd))
                # Where a file has two numbers, nothing can be told from them.
                self._identity = identity if identity == _identity(os.stat(self._path)) else None
            except BaseException:
                os.close(fd)
                raise
            self._num_removed += max(0, self._num_stored - num_found)
            self._num_stored, self._size, self._fd = num_found, size, fd
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
        # Lines and bytes of each.
        self._segments: list[tuple[int, int]] = []
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._num_dropped = 0
        self._refusal = ""
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
                thread = threading.Thread(target=self._run, name="ray_lite-history", daemon=True)
                # Kept only once it runs: a thread that could not be started cannot be waited for.
                thread.start()
                self._thread = thread
            if self._waiting_bytes >= self._max_segment_bytes:
                self._changed.notify()

    def flush(self) -> None:
        with self._writing:
            with self._changed:
                lines, size = self._lines, self._waiting_bytes
                self._lines, self._waiting_bytes = [], 0
            if not lines:
                return
            path = self._segment_path(len(self._segments))
            try:
                self._files.write(path, b"\n".join(lines) + b"\n")
            except Exception as error:  # noqa: BLE001  # whatever it is, the lines are kept and training goes on
                if not self._refusal:
                    logger.warning("history %s cannot be written now, its lines wait in memory: %s", path, error)
                self._refusal = str(error) or type(error).__name__
                with self._changed:
                    self._lines, self._waiting_bytes = lines + self._lines, size + self._waiting_bytes
                return
            self._refusal = ""
            self._segments.append((len(lines), size))

    def close(self) -> Unstored | None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.flush()
        lost = _describe_lost(self._num_lines_gone(), self._num_dropped, self._max_waiting_bytes)
        lines, name = self._lines, self._segment_path(len(self._segments)).rpartition("/")[2]
        self._lines, self._waiting_bytes, self._num_dropped, self._segments = [], 0, 0, []
        if not lines and not lost:
            return None
        return Unstored(lines=b"".join(line + b"\n" for line in lines), file_name=name, reason=self._refusal, lost=lost)

    def _segment_path(self, number: int) -> str:
        return f"{self._prefix}_{number:06d}.jsonl"

    def _num_lines_gone(self) -> int:
        """Lines of segments that somebody has removed meanwhile; one listing tells."""
        # A store that refuses would only keep the end of the run waiting.
        if not self._segments or self._refusal:
            return 0
        try:
            found = {entry.name: entry.size_bytes for entry in self._files.entries(self._prefix.rpartition("/")[0])}
        except Exception as error:  # noqa: BLE001  # all was stored; only that it still lies there is not known
            logger.debug("history %s* cannot be listed: %s", self._prefix, error)
            return 0
        return sum(
            num_lines
            for number, (num_lines, size) in enumerate(self._segments)
            if found.get(self._segment_path(number).rpartition("/")[2], -1) < size
        )

    def _run(self) -> None:
        due = self._now() + self._interval_s
        while True:
            with self._changed:
                # While the store refuses, only time brings the next try.
                is_full = not self._refusal and self._waiting_bytes >= self._max_segment_bytes
                if not self._is_closed and not is_full:
                    self._changed.wait(max(0.0, due - self._now()))
                if self._is_closed:
                    return
                is_due = self._now() >= due or (not self._refusal and self._waiting_bytes >= self._max_segment_bytes)
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


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _read_all(fd: int) -> bytes:
    data = bytearray()
    while chunk := os.pread(fd, 1 << 20, len(data)):
        data += chunk
    return bytes(data)


def _lines_at(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return file.read().count(b"\n")
    except OSError:
        return 0


def _describe_lost(num_removed: int, num_dropped: int, max_waiting_bytes: int) -> str:
    parts = []
    if num_removed:
        parts.append(f"{num_removed} lines that were stored have been removed from outside")
    if num_dropped:
        parts.append(f"{num_dropped} lines came while {max_waiting_bytes} bytes waited already, and were dropped")
    return "; ".join(parts)


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
    own: dict[int, HistoryRow] = {}
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
                if attempt == current and row.report_index in own:
                    own[row.report_index].over_ranks.update(row.values)
                continue
            if attempt != current:
                current, own = attempt, {}
                rows = [earlier for earlier in rows if earlier.report_index < row.report_index]
            own[row.report_index] = row
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
