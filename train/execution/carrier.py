"""The driver's disk, for workers whose nodes do not see it.

The controller runs on the driver's node and owns a ``Carrier``; ``carry.CarryFileSystem`` is the
other end.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..storage.checkpoint import Checkpoint
from ..storage.disk import DiskFiles
from ..storage.files import is_temporary
from ..storage.root import StorageRoot

__all__ = ["PIECE_BYTES", "Carrier", "make_carrier"]

PIECE_BYTES = 8 << 20
"""Most bytes of a file in one call, so that no process ever holds a whole large file."""
_MAX_AT_ONCE = 4


def make_carrier(run: StorageRoot, start: Checkpoint | None) -> Carrier:
    """For the workers of one run: its own folder, and the checkpoint that the user gave it to start from."""
    return Carrier(
        writable=[run.files()[1]] if run.is_local else [],
        readable=[start.path] if start is not None and start.is_local else [],
    )


class Carrier:
    """Operations on a few folders of this process's disk, and on nothing else.

    Each may run twice without harm, so a caller may repeat what it got no answer to.

    Args:
        writable: Folders below which everything is allowed: the run's.
        readable: Folders below which files may be read.
    """

    def __init__(self, *, writable: Sequence[str] = (), readable: Sequence[str] = ()) -> None:
        self._writable = [os.path.realpath(folder) for folder in writable]
        self._readable = [*self._writable, *(os.path.realpath(folder) for folder in readable)]
        self._disk = DiskFiles()
        # Threads of its own: they may all be busy with large files while the controller directs the run.
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="ray_lite-carry")
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def serve(self, operation: str, args: Sequence[Any]) -> Any:
        """Do one operation for a worker.

        Args:
            operation: See ``carry``.
            args: Its arguments; one in a list is a Ray reference to it, and is fetched only when
                it is its turn, so that few pieces are in memory at a time.

        Returns:
            What ``carry`` returns or, as a value, the error that it raises.
        """
        async with self._slots:
            fetched = [await arg[0] if isinstance(arg, list) else arg for arg in args]
            run = asyncio.get_running_loop().run_in_executor
            try:
                return await run(self._threads, lambda: self.carry(operation, *fetched))
            except (OSError, ValueError) as error:
                return error

    def carry(self, operation: str, *args: Any) -> Any:
        """Do one operation on the disk: ``look``, ``list``, ``read``, ``write`` and so on, see below.

        Raises:
            PermissionError: A path lies outside of the folders that may be used.
            OSError: As the operating system says.
            ValueError: There is no such operation, or an argument is not allowed.
        """
        known: dict[str, Callable[..., Any]] = {
            "look": self._look,
            "list": self._list,
            "read": self._read,
            "write": self._write,
            "create": self._create,
            "write_piece": self._write_piece,
            "rename": self._rename,
            "remove": self._remove,
            "make_folder": self._make_folder,
            "remove_folder": self._remove_folder,
        }
        if operation not in known:
            raise ValueError(f"no operation {operation!r}; known are {', '.join(known)}")
        return known[operation](*args)

    def _look(self, path: str) -> tuple[bool, int]:
        """Whether it is a folder, and its bytes."""
        path = self._to_read(path)
        is_folder = os.path.isdir(path)
        return is_folder, 0 if is_folder else os.stat(path).st_size

    def _list(self, path: str) -> list[tuple[str, bool, int]]:
        """Name, whether it is a folder, and bytes of each thing in a folder."""
        path = self._to_read(path)
        if not os.path.isdir(path):
            os.stat(path)
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
        return [(entry.name, entry.is_dir, entry.size_bytes) for entry in self._disk.entries(path)]

    def _read(self, path: str, start: int, size_bytes: int) -> bytes:
        """Bytes from ``start`` on: fewer than asked for only at the file's end."""
        if not 0 <= size_bytes <= PIECE_BYTES or start < 0:
            raise ValueError(f"a piece has at most {PIECE_BYTES} bytes, got start={start}, size_bytes={size_bytes}")
        pieces: list[bytes] = []
        with open(self._to_read(path), "rb", buffering=0) as file:
            while size_bytes and (piece := os.pread(file.fileno(), size_bytes, start)):
                pieces.append(piece)
                start, size_bytes = start + len(piece), size_bytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _write(self, path: str, data: bytes) -> None:
        """Make or replace a file, whole or not at all, and the folders above it."""
        self._disk.write(self._to_change(path), data)

    def _create(self, path: str, data: bytes) -> bool:
        """Make a file unless it is there."""
        return self._disk.create(self._to_change(path), data)

    def _write_piece(self, path: str, start: int, data: bytes) -> None:
        """Write into an unfinished file, which ``rename`` finishes; the piece at 0 begins it anew."""
        path = self._to_change(path)
        if not is_temporary(path):
            raise ValueError(f"only unfinished files are written in pieces, and {path!r} is not named like one")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_TRUNC if start == 0 else 0)
        if start == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, flags, 0o666)
        try:
            view = memoryview(data)
            while view:
                count = os.pwrite(file, view, start)
                view, start = view[count:], start + count
        finally:
            os.close(file)

    def _rename(self, source: str, target: str) -> None:
        os.replace(self._to_change(source), self._to_change(target))

    def _remove(self, path: str) -> None:
        os.unlink(self._to_change(path))

    def _make_folder(self, path: str, exist_ok: bool) -> None:
        if exist_ok and os.path.realpath(path) in self._writable:
            return
        os.makedirs(self._to_change(path), exist_ok=exist_ok)

    def _remove_folder(self, path: str) -> None:
        os.rmdir(self._to_change(path))

    def _to_read(self, path: str) -> str:
        """``path`` with every link resolved.

        Raises:
            PermissionError: It leads out of the folders that may be read.
        """
        real = os.path.realpath(path)
        return _checked(path, real, any(_is_below(real + os.sep, folder) for folder in self._readable))

    def _to_change(self, path: str) -> str:
        """``path`` with the links on its way resolved; its last part is what is changed, link or not.

        Raises:
            PermissionError: It leads out of the folders that may be changed, or is one of them.
        """
        parent, name = os.path.split(path.rstrip("/"))
        real = os.path.join(os.path.realpath(parent), name)
        is_name = name not in ("", ".", "..")
        return _checked(path, real, is_name and any(_is_below(real, folder) for folder in self._writable))


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)


def _checked(path: str, real: str, is_allowed: bool) -> str:
    # A relative path would mean something else to each process.
    if not is_allowed or not os.path.isabs(path):
        raise PermissionError(errno.EACCES, "outside of the folders that workers may use", path)
    return real
