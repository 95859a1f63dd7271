"""One local copy of a remote folder, shared by all processes of a node while any of them reads it.

Every reader holds a shared ``flock`` on the copy's lock file. The kernel drops the lock with
the process, however it ends, so a killed reader neither blocks the others nor keeps the copy:
whoever can take the lock exclusively knows that nobody reads, and may remove the copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

try:
    import fcntl
except ImportError:  # Windows: each reader has a copy of its own
    fcntl = None  # type: ignore[assignment]

__all__ = ["shared_copy"]


@contextlib.contextmanager
def shared_copy(key: str, fill: Callable[[str], None]) -> Iterator[str]:
    """A local folder with the content that ``key`` stands for.

    Args:
        key: File name that names the content: equal keys share one copy.
        fill: Fills the empty folder it is given; runs in one process only. If it
            raises, nothing is left, and the next reader tries again.
    """
    if fcntl is None:
        with tempfile.TemporaryDirectory(prefix="ray_lite_") as private:
            fill(private)
            yield private
        return
    base = _base_folder()
    _remove_abandoned(base, key)
    copy, lock_path = os.path.join(base, key), os.path.join(base, key + ".lock")
    lock = _lock_shared_and_filled(lock_path, copy, fill)
    try:
        yield copy
    finally:
        _remove_if_unused(lock, lock_path, copy)


def _base_folder() -> str:
    """A folder of this user alone: nobody else may place files that will be loaded."""
    base = os.path.join(tempfile.gettempdir(), f"ray_lite_checkpoints_{os.getuid()}")
    os.makedirs(base, mode=0o700, exist_ok=True)
    status = os.lstat(base)
    if os.path.islink(base) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{base} belongs to somebody else or can be written by others; remove it")
    return base


def _open_lock(lock_path: str, mode: int) -> int:
    """Lock the file that is at ``lock_path`` at the end, not one that was removed while we waited."""
    while True:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, mode)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(lock_path)):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _lock_shared_and_filled(lock_path: str, copy: str, fill: Callable[[str], None]) -> int:
    while True:
        lock = _open_lock(lock_path, fcntl.LOCK_SH)
        if os.path.isdir(copy):
            return lock
        os.close(lock)
        lock = _open_lock(lock_path, fcntl.LOCK_EX)
        try:
            if not os.path.isdir(copy):
                _fill_whole(copy, fill)
        except BaseException:
            os.unlink(lock_path)
            os.close(lock)
            raise
        # Downgrading is not atomic, so look again under the shared lock.
        os.close(lock)


def _fill_whole(copy: str, fill: Callable[[str], None]) -> None:
    unfinished = copy + ".part"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.mkdir(unfinished)
    try:
        fill(unfinished)
        os.rename(unfinished, copy)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove_if_unused(lock: int, lock_path: str, copy: str) -> None:
    """Drop the lock held; the last reader takes the copy away."""
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Converting drops the old lock first: another may have removed it all in between.
            if os.path.exists(lock_path) and os.path.samestat(os.fstat(lock), os.stat(lock_path)):
                _remove(copy, lock_path)
    except FileNotFoundError:
        return
    finally:
        os.close(lock)


def _remove(copy: str, lock_path: str) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(copy + ".part", ignore_errors=True)
    os.unlink(lock_path)


def _remove_abandoned(base: str, wanted: str) -> None:
    """Take away copies whose readers died."""
    for name in os.listdir(base):
        if not name.endswith(".lock") or name == wanted + ".lock":
            continue
        lock_path = os.path.join(base, name)
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        _remove_if_unused(lock, lock_path, lock_path.removesuffix(".lock"))
