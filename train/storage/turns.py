"""One call at a time, for drivers whose connection carries only one conversation.

paramiko's SFTP client hands an answer to whichever thread reads next, and drops it when that
thread did not ask: two calls at the same moment wait for ever. fsspec's driver shares one
client between all who open the same place, and never connects again once it is lost.
"""

from __future__ import annotations

import contextlib
import io
import threading
from typing import IO, Any

from fsspec.spec import AbstractFileSystem

__all__ = ["ConnectionTurn", "turn_of"]

_DRIVER = "fsspec.implementations.sftp"


class ConnectionTurn:
    """While it is entered, no other thread uses the connection, and there is one.

    Args:
        driver: fsspec's ``SFTPFileSystem``.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        # On the driver itself, so that all who share the connection share the turn.
        self._lock: threading.RLock = vars(driver).setdefault("_ray_lite_turn", threading.RLock())

    def __enter__(self) -> ConnectionTurn:
        self._lock.acquire()
        try:
            transport = self._driver.client.get_transport()
            if transport is None or not transport.is_active():
                self._driver.client.close()
                self._driver._connect()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def read_ahead(self, file: Any, size_bytes: int) -> None:
        """Ask for the next parts before they are read, where ``file`` can: one at a time costs a round trip each."""
        prefetch = getattr(file, "prefetch", None)
        if prefetch is not None and size_bytes:
            prefetch(size_bytes, max_concurrent_requests=64)

    def reader(self, file: IO[bytes]) -> IO[bytes]:
        """``file``, read in turns."""
        return io.BufferedReader(_ReadInTurns(file, self), buffer_size=1 << 20)


class _ReadInTurns(io.RawIOBase):
    def __init__(self, file: IO[bytes], turn: ConnectionTurn) -> None:
        self._file = file
        self._turn = turn

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._turn:
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._turn:
            self._file.seek(offset, whence)
            return self._file.tell()

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(OSError, EOFError), self._turn:
                self._file.close()
        super().close()


def turn_of(filesystem: AbstractFileSystem) -> ConnectionTurn | None:
    """The turn that calls of ``filesystem`` must take; None where they may run at the same time."""
    inner: Any = filesystem
    while isinstance(inner, AbstractFileSystem):
        if any(cls.__module__ == _DRIVER for cls in type(inner).__mro__):
            return ConnectionTurn(inner)
        inner = getattr(inner, "fs", None)
    return None
