"""Every kind of place that a run can be stored in, each with a plain client to look and to meddle with."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from servers import Raw, RawFolder, Server

from ray_lite.train.storage.retry import RetryPolicy
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

# What users' folders are called, and what a URI or a pattern would make something else of. "#" and "?" are refused
# in URIs; file names may hold them all the same.
HARD_FOLDER = "a b/[x]*%41é+&=@"

SERVERS = ("s3", "azure", "google", "sftp", "sshfs")
KINDS = ("local", "file", "memory", "filesystem", *SERVERS)


@attrs.frozen
class Place:
    """A storage path of one test alone."""

    kind: str
    root: StorageRoot
    raw: Raw = attrs.field(repr=False)
    base: str
    """Key of the storage path for ``raw``."""
    secrets: tuple[str, ...] = ()

    def store(self, run_name: str = "run", **options: Any) -> RunStore:
        """A store that shares nothing with those made before, as in another process."""
        return RunStore(self.root, run_name, **options)

    def key(self, *names: str) -> str:
        return "/".join((self.base, *names)).lstrip("/")

    def stored(self, *names: str) -> list[str]:
        """Names of all files below, relative to the storage path."""
        start = self.key("")
        return [key[len(start) :] for key in self.raw.keys(self.key(*names))]


class _RawMemory:
    def read(self, key: str) -> bytes:
        return MemoryFileSystem.store["/" + key].getvalue()

    def write(self, key: str, data: bytes) -> None:
        MemoryFileSystem().pipe_file("/" + key, data)

    def remove(self, key: str) -> None:
        del MemoryFileSystem.store["/" + key]

    def keys(self, prefix: str) -> list[str]:
        return sorted(key[1:] for key in MemoryFileSystem.store if key[1:].startswith(prefix))


def place_on(server: Server, folder: str = HARD_FOLDER) -> Place:
    """A fresh storage path on a server."""
    base = f"{secrets.token_hex(4)}/{folder}"
    root = StorageRoot.resolve(f"{server.base}/{base}", server.options)
    return Place(server.protocol, root, server.raw, base, server.secrets)


def make_place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A fresh storage path of this kind."""
    if kind in SERVERS:
        return place_on(request.getfixturevalue(f"{kind}_server"))
    folder = tmp_path / HARD_FOLDER
    if kind == "local":
        return Place(kind, StorageRoot.resolve(folder), RawFolder(folder), "")
    if kind == "file":
        return Place(kind, StorageRoot.resolve(folder.as_uri()), RawFolder(folder), "")
    if kind == "memory":
        base = f"{tmp_path.name}/{HARD_FOLDER}"
        return Place(kind, StorageRoot.resolve(f"memory://{base}"), _RawMemory(), base)
    if kind == "filesystem":
        filesystem = DirFileSystem(str(tmp_path), LocalFileSystem())
        return Place(kind, StorageRoot.resolve(HARD_FOLDER, filesystem=filesystem), RawFolder(folder), "")
    assert kind == "s3_filesystem"
    import s3fs

    server = request.getfixturevalue("s3_server")
    base = f"{secrets.token_hex(4)}/{HARD_FOLDER}"
    # Caches on, as users have them.
    root = StorageRoot.resolve(f"bucket/{base}", filesystem=s3fs.S3FileSystem(**server.options))
    return Place(kind, root, server.raw, base, server.secrets)


@contextlib.contextmanager
def no_retries() -> Iterator[Callable[[], RetryPolicy]]:
    """A policy that fails the test when something is tried again."""
    waits: list[float] = []
    yield lambda: RetryPolicy(sleep=waits.append)
    assert waits == [], f"tried again {len(waits)} times"
