"""The few operations on files that storage is built from.

Two kinds of place implement them: a disk that the operating system opens
(`disk.DiskFiles`) and anything that fsspec opens (`remote.RemoteFiles`). All paths are
absolute inside the place, with ``/`` as the separator and without a trailing one. No operation
ever takes a pattern: a folder named ``run[1]*`` is just a folder.
"""

from __future__ import annotations

import re
from typing import IO, Protocol

import attrs

__all__ = ["TEMPORARY_PREFIX", "Entry", "Files", "is_temporary"]

TEMPORARY_PREFIX = ".tmp-"
"""Names of files that were not finished; at the start of a run, all of them are rubbish."""
_TEMPORARY = re.compile(rf"^{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{16}}$")


def is_temporary(path: str) -> bool:
    """Whether a file of that name is the rubbish of a write that was cut off."""
    return _TEMPORARY.match(path.rpartition("/")[2]) is not None


@attrs.frozen
class Entry:
    """One name in a folder."""

    name: str
    is_dir: bool
    size_bytes: int


class Files(Protocol):
    """Files in one place. Each operation repeats itself after transient errors where that can help."""

    @property
    def is_local(self) -> bool:
        """Whether paths can be given to ``open()``."""

    @property
    def max_concurrency(self) -> int:
        """Operations worth running at the same time."""

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""

    def write(self, path: str, data: bytes) -> None:
        """Make or replace the file: readers see the old bytes or the new ones, never a part. Makes folders."""

    def create(self, path: str, data: bytes) -> bool:
        """Make the file unless it is there. False: it is there."""

    def size(self, path: str) -> int | None:
        """Bytes of the file now, not from a cache; None when it is not there."""

    def entries(self, path: str) -> list[Entry]:
        """What the folder holds now, not from a cache, sorted by name; empty when it is not there."""

    def walk(self, path: str) -> dict[str, int]:
        """Relative path → bytes of every file below the folder; empty when it is not there."""

    def remove(self, path: str) -> None:
        """Remove the file; not an error when it is not there."""

    def remove_tree(self, path: str) -> None:
        """Remove the folder and all below it; not an error when it is not there."""

    def put(self, local_path: str, path: str, size_bytes: int, *, checksum: bool = True) -> int | None:
        """Copy a local file to ``path``, whole or not at all, and return its crc32. Makes folders.

        Without ``checksum``, it is left out (None) where computing it takes time.
        """

    def move(self, local_path: str, path: str) -> None:
        """Make a local file of the same disk the file at ``path``, without a copy. Only where ``is_local``."""

    def get(self, path: str, local_path: str, size_bytes: int) -> int:
        """Copy ``path`` to a local file whose folder exists, and return the crc32 of what arrived."""

    def checksum(self, path: str, size_bytes: int) -> int:
        """crc32 of the file as it is stored; ``size_bytes`` is what it should have."""

    def open_read(self, path: str) -> IO[bytes]:
        """Open the file for reading."""
