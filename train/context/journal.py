"""A worker's reports on its own disk, until the controller has them.

One record a line, appended before ``report()`` returns: what the operating system has
taken survives the death of the process, though not the loss of the node. Segments that
the controller has acknowledged are deleted, so the journal stays small.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

__all__ = ["Journal", "claim_folder", "is_running", "journal_root", "read_tail", "remove_journal", "sweep"]

_SEGMENT = "reports_{first:012d}.jsonl"
_MAX_SEGMENT_BYTES = 8 << 20
DIR_VARIABLE = "RAY_LITE_JOURNAL_DIR"
"""Environment variable: where workers keep their journals."""
_OWNER = "owner"
_MIN_AGE_S = 3_600.0


def journal_root() -> Path:
    """The folder of this user on this node that holds all journals.

    Below the system's temporary folder, or below ``RAY_LITE_JOURNAL_DIR`` where that is set in
    the environment of the cluster's processes.
    """
    base = os.environ.get(DIR_VARIABLE) or tempfile.gettempdir()
    return Path(base) / f"ray_lite-{os.getuid()}"


def claim_folder(folder: str | os.PathLike[str]) -> Path:
    """Make a folder of one worker and attempt, if it is missing, and note that this process owns it (see ``sweep``)."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    # By rename: to a sweep that reads it half written, a living worker would look dead.
    new = path / f"{_OWNER}.{os.getpid()}.{threading.get_ident()}"
    new.write_text(str(os.getpid()))
    new.replace(path / _OWNER)
    return path


class Journal:
    """Appends records; belongs to one writer.

    Args:
        folder: A folder of this worker and attempt alone; made if missing.
        max_segment_bytes: A new file is begun after this size.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_segment_bytes: int = _MAX_SEGMENT_BYTES) -> None:
        self._folder = claim_folder(folder)
        self._max_segment_bytes = max_segment_bytes
        self._count = 0
        self._segments: list[tuple[int, Path]] = []
        self._fd = -1
        self._open_segment()

    @property
    def count(self) -> int:
        """Records appended so far."""
        return self._count

    def append(self, record: bytes) -> None:
        """Hand one record (no line break in it) to the operating system."""
        data = record + b"\n"
        written = os.write(self._fd, data)
        while written < len(data):
            written += os.write(self._fd, data[written:])
        self._count += 1
        self._size += len(data)

    def acknowledge(self, count: int) -> None:
        """The first ``count`` records are safe elsewhere; segments that hold no others go.

        Raises:
            OSError: No new segment can be begun, or an old one not be deleted. The journal is as
                good as before, only larger than it should be; the next call tries again.
        """
        if self._fd >= 0 and self._size >= self._max_segment_bytes:
            self._open_segment()
        while len(self._segments) > 1 and self._segments[1][0] <= count:
            self._segments[0][1].unlink(missing_ok=True)
            self._segments.pop(0)

    def close(self) -> None:
        """Stop writing; the files stay."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_segment(self) -> None:
        path = self._folder / _SEGMENT.format(first=self._count)
        # Before the old one is closed: where no file can be opened, the old one goes on. A number that was
        # closed and kept would soon be that of a file of the user's, and records would land in there.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        old, self._fd = self._fd, fd
        self._segments.append((self._count, path))
        self._size = 0
        if old >= 0:
            os.close(old)


def read_tail(folder: str | os.PathLike[str], *, after: int) -> list[bytes]:
    """The records from number ``after`` on, in order.

    A last line without its line break was never acknowledged to the caller of
    ``report()``, and is left out.
    """
    records: list[bytes] = []
    for path in sorted(Path(folder).glob("reports_*.jsonl")):
        first = int(path.stem.removeprefix("reports_"))
        *lines, _torn = path.read_bytes().split(b"\n")
        if first + len(lines) > after:
            records.extend(lines[max(0, after - first) :])
    return records


def remove_journal(folder: str | os.PathLike[str]) -> None:
    """Delete the journal's folder, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep(root: Path, *, min_age_s: float = _MIN_AGE_S) -> list[Path]:
    """Remove what killed runs have left: folders of runs all of whose writers are gone.

    Args:
        root: From ``journal_root``.
        min_age_s: A run that was written to more recently is let alone: its controller may
            be about to read the tail.

    Returns:
        The folders removed.
    """
    removed: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        for run in root.iterdir():
            owners = list(run.glob(f"attempt_*/rank_*/{_OWNER}"))
            newest = max((owner.parent.stat().st_mtime for owner in owners), default=run.stat().st_mtime)
            if time.time() - newest < min_age_s or any(is_running(owner.read_text()) for owner in owners):
                continue
            shutil.rmtree(run, ignore_errors=True)
            removed.append(run)
    return removed


def is_running(pid: str) -> bool:
    """Whether a process of that number lives on this machine; also False for what is no number."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
