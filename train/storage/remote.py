"""Files in any place that fsspec opens."""

from __future__ import annotations

import io
import secrets
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.spec import AbstractFileSystem

from .checksum import ChecksumBeside, checksum_file, checksum_stream
from .files import TEMPORARY_PREFIX, Entry
from .retry import RetryPolicy
from .turns import ConnectionTurn, turn_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RemoteFiles"]

T = TypeVar("T")

# Stores without folders, where one PUT appears whole or not at all. In them nothing is ever
# created or removed but objects: "makedirs" would create a bucket, "rmdir" would delete one.
_OBJECT_STORES = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos", "obs", "oci", "ocilake", "b2", "memory")
)
_CHUNK = 8 << 20
_SMALL = 4 << 20
_MAX_SHORT_WRITES = 8


class RemoteFiles:
    """Files behind an fsspec filesystem, with retries, deadlines and no trust in caches.

    Only operations on single paths are used: fsspec expands patterns in all others, and a
    folder may well be called ``run[1]``.
    """

    is_local = False

    def __init__(self, filesystem: AbstractFileSystem, retry: RetryPolicy | None = None) -> None:
        self._fs = filesystem
        self._retry = retry or RetryPolicy()
        protocols = _protocols(filesystem)
        self._is_object_store = bool(protocols & _OBJECT_STORES)
        self._is_memory = "memory" in protocols
        # The default of fsspec copies and deletes, which is no rename.
        self._can_rename = not self._is_object_store and _has_own(filesystem, "mv")
        # Drivers of others have these operations in name: sshfs reads whole files for a range, and the generic
        # find() takes a folder that cannot be listed for an empty one.
        self._has_ranges_and_find = self._is_object_store and isinstance(filesystem, AsyncFileSystem)
        self._turn = turn_of(filesystem)
        self._sends_files = self._turn is not None or isinstance(filesystem, AsyncFileSystem)
        # SSH servers allow about ten channels a connection.
        # paramiko takes apart what it is given in 32 KiB requests, in quadratic time: only its own transfers are fast.
        self._small = _SMALL if self._turn is None else 32 << 10
        self.max_concurrency = 1 if self._turn else 4 if protocols & {"sftp", "ssh"} else 16
        # All readers of one file of a MemoryFileSystem share its position.
        self._memory_lock = _MEMORY_LOCK if self._is_memory else None

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The fsspec filesystem behind."""
        return self._fs

    def read(self, path: str) -> bytes:
        return self._call(lambda: cast(bytes, self._fs.cat_file(path)), f"read {path}")

    def write(self, path: str, data: bytes) -> None:
        if not self._can_rename:
            self._store_whole(path, data)
            return
        temporary = f"{_parent(path)}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        try:
            self._store_whole(temporary, data)
            self._call(lambda: self._rename_once(temporary, path, len(data)), f"rename to {path}")
        except Exception:
            self._remove_quietly(temporary)
            raise

    def create(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        try:
            self._call(lambda: self._create_once(path, data), f"create {path}", len(data))
        except FileExistsError:
            # Perhaps our own first try, whose answer was lost: the content decides.
            return self._read_or_none(path) == data
        if self.size(path) != len(data):
            self._store_whole(path, data)
        return self._read_or_none(path) == data

    def size(self, path: str) -> int | None:
        return self._call(lambda: self._size_once(path), f"look at {path}")

    def entries(self, path: str) -> list[Entry]:
        return self._call(lambda: self._list_once(path), f"list {path}")

    def walk(self, path: str) -> dict[str, int]:
        if self._has_ranges_and_find:
            # One listing by prefix, where the generic walk asks folder by folder.
            return self._call(lambda: self._find_once(path), f"list {path}")
        files: dict[str, int] = {}
        folders = [""]
        while folders:
            prefix = folders.pop()
            for entry in self.entries(f"{path}/{prefix}".rstrip("/")):
                if entry.is_dir:
                    folders.append(f"{prefix}{entry.name}/")
                else:
                    files[prefix + entry.name] = entry.size_bytes
        return files

    def remove(self, path: str) -> None:
        self._call(lambda: self._remove_once(path), f"delete {path}")

    def remove_tree(self, path: str) -> None:
        if self._is_object_store:
            self._all(self.remove, [f"{path}/{name}" for name in self.walk(path)])
            return
        # Folder by folder, so that one which is empty already goes too.
        entries = self.entries(path)
        self._all(self.remove, [f"{path}/{entry.name}" for entry in entries if not entry.is_dir])
        for entry in entries:
            if entry.is_dir:
                self.remove_tree(f"{path}/{entry.name}")
        self._call(lambda: self._remove_folder_once(path), f"delete {path}")

    def put(self, local_path: str, path: str, size_bytes: int, *, checksum: bool = True) -> int | None:
        self._check_name(path)
        return self._call(lambda: self._put_once(local_path, path, size_bytes), f"write {path}", size_bytes)

    def move(self, local_path: str, path: str) -> None:
        raise NotImplementedError("remote storage has no disk to share")

    def get(self, path: str, local_path: str, size_bytes: int) -> int:
        return self._call(lambda: self._get_once(path, local_path, size_bytes), f"read {path}", size_bytes)

    def checksum(self, path: str, size_bytes: int) -> int:
        if self._is_memory or size_bytes <= (_CHUNK if self._turn is None else self._small):
            return zlib.crc32(self.read(path))
        if self._has_ranges_and_find:
            # Ranges cost one request each; opening the file would ask for its size first.
            crc = 0
            for start in range(0, size_bytes, _CHUNK):
                end = min(start + _CHUNK, size_bytes)
                crc = zlib.crc32(self._read_range(path, start, end), crc)
            return crc
        return self._call(lambda: self._checksum_once(path, size_bytes), f"read {path}", size_bytes)

    def _read_range(self, path: str, start: int, end: int) -> bytes:
        return self._call(
            lambda: cast(bytes, self._fs.cat_file(path, start=start, end=end)), f"read {path}", end - start
        )

    def open_read(self, path: str) -> IO[bytes]:
        if self._is_memory:
            return io.BytesIO(self.read(path))
        file = self._call(lambda: cast("IO[bytes]", self._fs.open(path, "rb")), f"open {path}")
        return self._turn.reader(file) if self._turn else file

    # One try of each operation. All may run twice without harm.

    def _store_whole(self, path: str, data: bytes) -> None:
        """Write, and look whether all of it arrived: some servers take a part and say nothing."""
        for _ in range(_MAX_SHORT_WRITES):
            self._call(lambda: self._pipe_once(path, data), f"write {path}", len(data))
            stored = self.size(path)
            if stored == len(data):
                return
        raise OSError(f"{path} holds {stored} bytes after {len(data)} were written")

    def _rename_once(self, temporary: str, path: str, size_bytes: int) -> None:
        try:
            self._fs.mv(temporary, path)
        except FileNotFoundError:
            # Perhaps the first try went through, and its answer was lost.
            if self._size_once(path) != size_bytes:
                raise

    def _pipe_once(self, path: str, data: bytes) -> None:
        self._make_folder_if_missing(path, lambda: self._fs.pipe_file(path, data))

    def _create_once(self, path: str, data: bytes) -> None:
        try:
            self._make_folder_if_missing(path, lambda: self._fs.pipe_file(path, data, mode="create"))
        except (TypeError, NotImplementedError, ValueError):
            # A filesystem that knows no conditional write; the caller reads back what is there.
            self._pipe_once(path, data)

    def _size_once(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if info.get("type") == "directory" else int(info.get("size") or 0)

    def _list_once(self, path: str) -> list[Entry]:
        entries = {}
        for info in self._ls(path):
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            is_dir = info.get("type") == "directory"
            entries[name] = Entry(name, is_dir, 0 if is_dir else int(info.get("size") or 0))
        return [entries[name] for name in sorted(entries)]

    def _ls(self, path: str) -> Iterable[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Object stores list a folder's own marker object, and a file when asked for a folder.
        own = path.strip("/")
        return [info for info in found if str(info["name"]).strip("/") != own]

    def _find_once(self, path: str) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = path.strip("/") + "/"
        sizes = {name.lstrip("/"): int(info.get("size") or 0) for name, info in found.items()}
        return {name[len(start) :]: size for name, size in sizes.items() if name.startswith(start)}

    def _remove_once(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except (FileNotFoundError, KeyError):
            # MemoryFileSystem says KeyError.
            return

    def _remove_folder_once(self, path: str) -> None:
        self._fs.invalidate_cache()
        try:
            # Not isdir(): it answers False to every error.
            self._fs.info(path)
            if not _has_own(self._fs, "rmdir") and hasattr(self._fs, "_rmdir"):
                # sshfs defines it for its own loop only, and the name that all call does nothing.
                sync(self._fs.loop, self._fs._rmdir, path)
            else:
                self._fs.rmdir(path)
        except FileNotFoundError:
            return

    def _remove_quietly(self, path: str) -> None:
        try:
            self._remove_once(path)
        except Exception:  # noqa: BLE001  # the error that led here is the one to report
            return

    def _put_once(self, local_path: str, path: str, size_bytes: int) -> int:
        if size_bytes <= self._small:
            with open(local_path, "rb") as file:
                data = file.read()
            self._make_folder_if_missing(path, lambda: self._fs.pipe_file(path, data))
            return zlib.crc32(data)
        beside = ChecksumBeside(local_path)
        try:
            self._make_folder_if_missing(path, lambda: self._send(local_path, path))
        finally:
            crc = beside.wait()
        return crc

    def _send(self, local_path: str, path: str) -> None:
        if self._sends_files:
            # Object stores send the parts of one file concurrently.
            self._fs.put_file(local_path, path)
            return
        with open(local_path, "rb", buffering=0) as reading, self._fs.open(path, "wb") as writing:
            while chunk := reading.read(_CHUNK):
                writing.write(chunk)

    def _get_once(self, path: str, local_path: str, size_bytes: int) -> int:
        if self._is_memory or size_bytes <= self._small:
            data = self._fs.cat_file(path)
            with open(local_path, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            return zlib.crc32(data)
        if self._sends_files:
            self._fs.get_file(path, local_path)
            return checksum_file(local_path)
        crc = 0
        with self._fs.open(path, "rb") as reading, open(local_path, "wb") as writing:
            while chunk := reading.read(_CHUNK):
                crc = zlib.crc32(chunk, crc)
                writing.write(chunk)
        return crc

    def _checksum_once(self, path: str, size_bytes: int) -> int:
        with self._fs.open(path, "rb") as stream:
            if self._turn is not None:
                self._turn.read_ahead(stream, size_bytes)
            return checksum_stream(stream)

    def _make_folder_if_missing(self, path: str, write: Callable[[], object]) -> None:
        """Write straight away; only a filesystem with folders that lacks this one is asked to make it."""
        try:
            write()
        except FileNotFoundError:
            if self._is_object_store:
                raise
            self._fs.makedirs(_parent(path), exist_ok=True)
            write()

    def _check_name(self, path: str) -> None:
        stripped = self._fs._strip_protocol(path)
        if stripped.strip("/") != path.strip("/"):
            raise ValueError(f"this filesystem cannot hold a file of that name: {path!r} would become {stripped!r}")

    def _read_or_none(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def _call(self, operation: Callable[[], T], what: str, size_bytes: int = 0) -> T:
        if self._memory_lock is not None:
            with self._memory_lock:
                return self._retry.call(operation, what=what, with_deadline=False)
        if self._turn is not None:
            operation = _within(self._turn, operation)
        return self._retry.call(operation, what=what, size_bytes=size_bytes)

    def _all(self, operation: Callable[[str], object], paths: list[str]) -> None:
        if len(paths) <= 1 or self._is_memory or self.max_concurrency == 1:
            for path in paths:
                operation(path)
            return
        with ThreadPoolExecutor(min(self.max_concurrency, len(paths))) as pool:
            for _ in pool.map(operation, paths):
                pass


_MEMORY_LOCK = threading.RLock()


def _protocols(filesystem: AbstractFileSystem) -> set[str]:
    """All protocols that the filesystem goes by: its class, the bases (subclasses rename themselves), what it wraps."""
    wrapped = getattr(filesystem, "fs", None)
    found: set[str] = _protocols(wrapped) if isinstance(wrapped, AbstractFileSystem) else set()
    for cls in type(filesystem).__mro__:
        protocol = vars(cls).get("protocol", ())
        found.update((protocol,) if isinstance(protocol, str) else tuple(protocol))
    return found


def _has_own(filesystem: AbstractFileSystem, name: str) -> bool:
    """Whether the driver does it itself; drivers with a loop of their own get some names as they are built."""
    return name in vars(filesystem) or getattr(type(filesystem), name) is not getattr(AbstractFileSystem, name)


def _within(turn: ConnectionTurn, operation: Callable[[], T]) -> Callable[[], T]:
    def in_turn() -> T:
        with turn:
            return operation()

    return in_turn


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"
