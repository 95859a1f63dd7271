"""Files on a disk that the operating system itself opens."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from typing import IO

from .checksum import checksum_file, copy_file
from .files import TEMPORARY_PREFIX, Entry

__all__ = ["DiskFiles"]

# What FAT and some network mounts answer to link(2).
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class DiskFiles:
    """Local files: every new file is written under a temporary name and renamed.

    Nothing is synced to the platter: a commit survives the death of every process, and after
    a power failure the digests tell which checkpoints are whole.
    """

    is_local = True
    max_concurrency = 4

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        temporary = self._write_temporary(path, data)
        try:
            os.replace(temporary, path)
        except BaseException:
            _unlink(temporary)
            raise

    def create(self, path: str, data: bytes) -> bool:
        temporary = self._write_temporary(path, data)
        try:
            # A link fails when the name is taken, and appears with its content complete.
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_without_link(path, data)
        finally:
            _unlink(temporary)
        return True

    def size(self, path: str) -> int | None:
        try:
            return os.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def entries(self, path: str) -> list[Entry]:
        try:
            with os.scandir(path) as entries:
                found = [_entry(entry) for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.name)

    def walk(self, path: str) -> dict[str, int]:
        found: dict[str, int] = {}
        self._walk(path, "", found)
        return found

    def _walk(self, path: str, prefix: str, found: dict[str, int]) -> None:
        for entry in self.entries(path):
            if entry.is_dir:
                self._walk(f"{path}/{entry.name}", f"{prefix}{entry.name}/", found)
            else:
                found[prefix + entry.name] = entry.size_bytes

    def remove(self, path: str) -> None:
        _unlink(path)

    def remove_tree(self, path: str) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            # Somebody else removes it too: what matters is that it goes.
            if os.path.lexists(path):
                shutil.rmtree(path, ignore_errors=True)

    def put(self, local_path: str, path: str, size_bytes: int, *, checksum: bool = True) -> int | None:
        temporary = _temporary_beside(path)
        try:
            try:
                crc = copy_file(local_path, temporary, checksum=checksum)
            except FileNotFoundError:
                # The folder, most likely; if it is the source, the second try says so.
                os.makedirs(os.path.dirname(path), exist_ok=True)
                crc = copy_file(local_path, temporary, checksum=checksum)
            os.replace(temporary, path)
        except BaseException:
            _unlink(temporary)
            raise
        return crc

    def move(self, local_path: str, path: str) -> None:
        try:
            os.replace(local_path, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(local_path, path)

    def get(self, path: str, local_path: str, size_bytes: int) -> int:
        _unlink(local_path)
        crc = copy_file(path, local_path)
        assert crc is not None
        return crc

    def checksum(self, path: str, size_bytes: int) -> int:
        return checksum_file(path)

    def open_read(self, path: str) -> IO[bytes]:
        return open(path, "rb")

    def _write_temporary(self, path: str, data: bytes) -> str:
        temporary = _temporary_beside(path)
        try:
            try:
                _write_new(temporary, data)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _write_new(temporary, data)
        except BaseException:
            _unlink(temporary)
            raise
        return temporary


def _write_new(path: str, data: bytes) -> None:
    with open(path, "xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            # A part may be taken, before the disk is full.
            view = view[file.write(view) :]


def _create_without_link(path: str, data: bytes) -> bool:
    try:
        _write_new(path, data)
    except FileExistsError:
        return False
    return True


def _temporary_beside(path: str) -> str:
    # In the same folder: a rename is atomic only inside one filesystem.
    return f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def _entry(entry: os.DirEntry[str]) -> Entry | None:
    try:
        if entry.is_dir(follow_symlinks=False):
            return Entry(entry.name, True, 0)
        return Entry(entry.name, False, entry.stat(follow_symlinks=True).st_size)
    except FileNotFoundError:
        # Removed between the listing and the look at it, or a link to nowhere.
        return Entry(entry.name, False, 0) if entry.is_symlink() else None
