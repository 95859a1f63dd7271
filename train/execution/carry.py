"""``CarryFileSystem``: the driver's disk, as a worker on another node reaches it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import attrs
from fsspec.spec import AbstractFileSystem

from ..storage.files import TEMPORARY_PREFIX
from .carrier import PIECE_BYTES

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["CarryFileSystem", "ControllerTransport"]

# Below it, a message to an actor holds the data itself; above, the object store is quicker.
_INLINE_BYTES = 100_000


@attrs.frozen
class ControllerTransport:
    """Has the controller do an operation of its ``Carrier``; data travels through Ray's object store."""

    controller: Any = attrs.field(repr=False)

    def __call__(self, operation: str, *args: Any) -> Any:
        import ray

        # In a list, so that the controller fetches it when it is its turn, and not before.
        sent = [[ray.put(a)] if isinstance(a, bytes) and len(a) > _INLINE_BYTES else a for a in args]
        got = ray.get(self.controller.carry.remote(operation, *sent))
        if isinstance(got, Exception):
            raise got
        return got


class CarryFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    """An fsspec filesystem whose every operation is done by a ``Carrier``, usually the controller's.

    Paths are those of the driver's disk. Files appear whole or not at all.

    Args:
        transport: ``(operation, *args)`` → what ``Carrier.carry`` returns for them.
    """

    protocol = "carry"
    root_marker = "/"
    # Made in a few places only, and a cached one would keep the controller's handle for ever.
    cachable = False

    def __init__(self, transport: Callable[..., Any], **options: Any) -> None:
        super().__init__(use_listings_cache=False, **options)
        self._carry = transport

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        is_folder, size_bytes = self._carry("look", path)
        return _info(path, is_folder, size_bytes)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        try:
            entries = self._carry("list", path)
        except NotADirectoryError:
            found = [self.info(path)]
        else:
            found = [_info(f"{path.rstrip('/')}/{name}", *rest) for name, *rest in entries]
        return found if detail else [info["name"] for info in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        if (start or 0) < 0 or (end or 0) < 0:
            size = self.info(path)["size"]
            start = start if start is None or start >= 0 else max(0, size + start)
            end = end if end is None or end >= 0 else max(0, size + end)
        position, pieces = start or 0, list[bytes]()
        while end is None or position < end:
            wanted = PIECE_BYTES if end is None else min(PIECE_BYTES, end - position)
            pieces.append(self._carry("read", path, position, wanted))
            position += len(pieces[-1])
            if len(pieces[-1]) < wanted:
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path, value = self._strip_protocol(path), bytes(value)
        if mode == "create":
            if len(value) > PIECE_BYTES:
                raise NotImplementedError(f"a file of more than {PIECE_BYTES} bytes cannot be made conditionally")
            if not self._carry("create", path, value):
                raise FileExistsError(errno.EEXIST, "it is there already", path)
        elif len(value) <= PIECE_BYTES:
            self._carry("write", path, value)
        else:
            with self.open(path, "wb") as file:
                file.write(value)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        self._carry("rename", self._strip_protocol(path1), self._strip_protocol(path2))

    def rm_file(self, path: str) -> None:
        self._carry("remove", self._strip_protocol(path))

    def rmdir(self, path: str) -> None:
        self._carry("remove_folder", self._strip_protocol(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and with ``recursive`` folders and all in them. Names are never patterns."""
        paths: list[str] = path if isinstance(path, list) else [path]
        for one in paths:
            info = self.info(one)
            if info["type"] == "file":
                self.rm_file(info["name"])
                continue
            if recursive:
                self.rm(self.ls(info["name"], detail=False), recursive=True)
            self.rmdir(info["name"])

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        self._carry("make_folder", self._strip_protocol(path), False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._carry("make_folder", self._strip_protocol(path), exist_ok)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> io.BufferedReader | io.BufferedWriter:
        if mode == "rb":
            return io.BufferedReader(_Reading(self._carry, path), PIECE_BYTES)
        if mode == "wb":
            return _Upload(_Writing(self._carry, path), PIECE_BYTES)
        raise ValueError(f"mode must be 'rb' or 'wb', got {mode!r}")


class _Reading(io.RawIOBase):
    """A file on the other side, read by position."""

    def __init__(self, carry: Callable[..., Any], path: str) -> None:
        super().__init__()
        self._carry, self._path, self._position = carry, path, 0
        is_folder, self._size_bytes = carry("look", path)
        if is_folder:
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._size_bytes:
            return 0
        data = self._carry("read", self._path, self._position, min(len(view), PIECE_BYTES))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Writing(io.RawIOBase):
    """A new file on the other side, under a temporary name until it is closed."""

    def __init__(self, carry: Callable[..., Any], path: str) -> None:
        super().__init__()
        self._carry, self._path, self._position = carry, path, 0
        self._temporary = f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        self.is_whole = True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: ReadableBuffer) -> int:
        piece = bytes(memoryview(data).cast("B")[:PIECE_BYTES])
        try:
            self._carry("write_piece", self._temporary, self._position, piece)
        except BaseException:
            # Closing follows all the same, and must not make a file of a part.
            self.is_whole = False
            raise
        self._position += len(piece)
        return len(piece)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            if self.is_whole:
                if self._position == 0:
                    self._carry("write_piece", self._temporary, 0, b"")
                self._carry("rename", self._temporary, self._path)
        except BaseException:
            self.is_whole = False
            raise
        finally:
            if not self.is_whole:
                with contextlib.suppress(OSError):
                    self._carry("remove", self._temporary)


class _Upload(io.BufferedWriter):
    """Like any file open for writing, but an exception in its ``with`` block leaves nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            cast(_Writing, self.raw).is_whole = False
        super().__exit__(kind, value, traceback)


def _info(path: str, is_folder: bool, size_bytes: int) -> dict[str, Any]:
    return {"name": path, "size": size_bytes, "type": "directory" if is_folder else "file"}
