"""An fsspec filesystem that fails on purpose, the same way for the same seed.

Wraps any other fsspec filesystem::

    from fsspec.implementations.memory import MemoryFileSystem
    from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem

    plan = FaultPlan(seed=7, error_rate=0.3)
    filesystem = FaultyFileSystem(MemoryFileSystem(), plan)
    RunConfig(storage_path="bucket/runs", storage_filesystem=filesystem)

Use it to see what your own train function does when the storage is in a bad mood.
"""

from __future__ import annotations

import errno
import io
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from fsspec.spec import AbstractFileSystem

__all__ = ["FaultPlan", "FaultyFileSystem", "SimulatedCrash"]


class SimulatedCrash(BaseException):
    """The process "dies" here. No ``Exception``, so that no error handling gets in its way."""


class FaultPlan:
    """Which operations fail, and how.

    Args:
        seed: Equal seeds make equal faults for an equal sequence of operations.
        error_rate: Part of the operations, in [0, 1], that raise a transient error; half of them
            only after they took effect, as when an answer is lost.
        short_write_rate: Part of the writes that silently store only a beginning.
        stale_listings: Listings are remembered until ``invalidate_cache()``, as caching filesystems do.
        latency_s: Seconds that each operation takes.
        crash_at: Number of the operation (from 0) at which `SimulatedCrash` is raised, and at
            every one after it: a dead process does nothing more.
        crash_when: ``"before"`` the operation, ``"after"`` it, or in the ``"middle"``: of
            a write, half is stored.
        sleep: Called for ``latency_s``.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        error_rate: float = 0.0,
        short_write_rate: float = 0.0,
        stale_listings: bool = False,
        latency_s: float = 0.0,
        crash_at: int | None = None,
        crash_when: str = "before",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for name, rate in (("error_rate", error_rate), ("short_write_rate", short_write_rate)):
            if not 0 <= rate <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {rate}")
        if crash_when not in ("before", "middle", "after"):
            raise ValueError(f"crash_when must be 'before', 'middle' or 'after', got {crash_when!r}")
        self.error_rate, self.short_write_rate = error_rate, short_write_rate
        self.stale_listings, self.latency_s = stale_listings, latency_s
        self.crash_at, self.crash_when = crash_at, crash_when
        self.operations: list[str] = []
        """Every operation asked for: ``"write bucket/run.json"``."""
        self.num_faults = 0
        self.is_crashed = False
        self._sleep = sleep
        self._random = random.Random(seed)
        self._lock = threading.RLock()

    def run(self, name: str, path: str, operation: Callable[[], Any]) -> Any:
        """Do ``operation``, or what the plan says instead."""
        with self._lock:
            crash = self._next(f"{name} {path}")
            is_late = self._random.random() < 0.5
            fails = self._random.random() < self.error_rate
        if self.latency_s:
            self._sleep(self.latency_s)
        if crash in ("before", "middle"):
            self._die()
        if fails and not is_late:
            self._fail(name, path)
        result = operation()
        if crash == "after":
            self._die()
        if fails:
            self._fail(name, path)
        return result

    def write(self, name: str, path: str, data: bytes, store: Callable[[bytes], Any]) -> Any:
        """As ``run``, for an operation that may be done by half."""
        with self._lock:
            is_short = len(data) > 0 and self._random.random() < self.short_write_rate
            if self.crash_at == len(self.operations) and self.crash_when == "middle" and not self.is_crashed:
                self._next(f"{name} {path}")
                store(data[: len(data) // 2])
                self._die()
        if is_short:
            self.num_faults += 1
            data = data[: self._random.randrange(len(data))]
        return self.run(name, path, lambda: store(data))

    def _next(self, operation: str) -> str | None:
        if self.is_crashed:
            raise SimulatedCrash("the process is dead")
        number = len(self.operations)
        self.operations.append(operation)
        return self.crash_when if self.crash_at == number else None

    def _die(self) -> None:
        self.is_crashed = True
        raise SimulatedCrash(f"crash {self.crash_when} operation {self.crash_at}: {self.operations[-1]}")

    def _fail(self, name: str, path: str) -> None:
        self.num_faults += 1
        raise OSError(errno.EIO, f"injected fault: {name}", path)


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Another filesystem with the faults of a `FaultPlan`.

    A file being written becomes visible, whole or cut, when it is closed.

    Args:
        inner: The filesystem that really stores.
        plan: The faults; may be exchanged later through ``plan``.
    """

    protocol = "faulty"
    cachable = False

    def __init__(self, inner: AbstractFileSystem, plan: FaultPlan | None = None) -> None:
        super().__init__()
        # Under the name that fsspec's own wrappers use, so that a store of objects is still known as one.
        self.fs = inner
        self.plan = plan or FaultPlan()
        self._listings: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a FaultyFileSystem counts operations, so it stays in its process")

    def _strip_protocol(self, path: Any) -> Any:
        if isinstance(path, str) and path.startswith("faulty://"):
            path = path[len("faulty://") :]
        return self.fs._strip_protocol(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listings.clear()
        self.fs.invalidate_cache(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if self.plan.stale_listings and path in self._listings:
            found = self._listings[path]
        else:
            found = self.plan.run("list", path, lambda: self.fs.ls(path, detail=True, **kwargs))
            self._listings[path] = found
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.plan.run("info", path, lambda: self.fs.info(path, **kwargs))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        return self.plan.run("read", path, lambda: self.fs.cat_file(path, start=start, end=end, **kwargs))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        return self.plan.write("write", path, value, lambda data: self.fs.pipe_file(path, data, mode=mode, **kwargs))

    def rm_file(self, path: str) -> None:
        self.plan.run("delete", path, lambda: self.fs.rm_file(path))

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        self.plan.run("mkdir", path, lambda: self.fs.mkdir(path, create_parents=create_parents, **kwargs))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.plan.run("mkdir", path, lambda: self.fs.makedirs(path, exist_ok=exist_ok))

    def rmdir(self, path: str) -> None:
        self.plan.run("rmdir", path, lambda: self.fs.rmdir(path))

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.plan.run("rename", path2, lambda: self.fs.mv(path1, path2, **kwargs))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" in mode:
            return io.BytesIO(self.cat_file(path))
        return _WrittenOnClose(self, path)


class _WrittenOnClose(io.BytesIO):
    def __init__(self, filesystem: FaultyFileSystem, path: str) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._path = path

    def close(self) -> None:
        if not self.closed:
            try:
                self._filesystem.pipe_file(self._path, self.getvalue())
            finally:
                super().close()
