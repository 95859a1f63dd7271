"""The lock of a run: one live process writes, and everybody can see which."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator

import attrs

from ..errors import RunInUseError, explained
from .files import Files

try:
    import fcntl
except ImportError:  # Windows: two processes that take over a dead lock at one moment are not told apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK_NAME", "HolderInfo", "RunLock"]

LOCK_NAME = ".lock.json"


@attrs.frozen(kw_only=True)
class HolderInfo:
    """Who holds a run, precisely enough to tell later whether that process still lives."""

    host: str
    pid: int
    process_started: str
    """Start of the process in the kernel's own units: with the pid it names one process for ever."""
    machine: str
    """This boot of this machine, and its namespace of process ids; empty where it cannot be known."""
    boot_identity: str
    """Host name and machine id: equal after a reboot, when ``machine`` differs."""
    user: str
    acquired_at: float
    """Seconds since the epoch."""
    run_id: str = ""
    """What the caller knows the holder by, for an ``is_alive`` that it supplies."""
    token: str = attrs.field(factory=lambda: secrets.token_hex(16))

    @classmethod
    def of_this_process(cls, *, run_id: str = "", now: Callable[[], float] = time.time) -> HolderInfo:
        """The holder that this process is."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            pid=pid,
            process_started=process_started(pid) or "",
            machine=_machine(),
            boot_identity=_boot_identity(),
            user=_user(),
            acquired_at=now(),
            run_id=run_id,
        )

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.acquired_at))
        return f"process {self.pid} of {self.user} on {self.host}, since {when}"

    def is_alive(self) -> bool | None:
        """Whether that process lives; None when it cannot be told from here."""
        if self.machine and self.machine == _machine():
            return process_started(self.pid) == self.process_started
        if self.boot_identity and self.boot_identity == _boot_identity() and self.acquired_at < _booted_at():
            return False
        return None


class RunLock:
    """The lock file in a run's folder.

    Args:
        files: Where the run lies.
        path: The lock file.
        shown: The run's folder, for messages.
    """

    def __init__(self, files: Files, path: str, shown: str) -> None:
        self._files = files
        self._path = path
        self._shown = shown
        self._held: HolderInfo | None = None

    def acquire(self, holder: HolderInfo, is_alive: Callable[[HolderInfo], bool | None] | None = None) -> None:
        """Take the lock, at once or not at all. A dead holder's is taken over.

        Args:
            holder: Who takes it.
            is_alive: Asked about a holder on another machine: True, False, or None for unknown.

        Raises:
            RunInUseError: Another live process holds it, or one of which nothing can be known.
        """
        data = json.dumps(attrs.asdict(holder)).encode()
        with self._exclusively():
            for _ in range(3):
                if self._files.create(self._path, data):
                    self._held = holder
                    return
                other = self._read()
                if other is not None:
                    self._refuse_if_alive(other, is_alive)
                # Where nothing excludes others meanwhile, the lock may be somebody else's by now.
                if self._read() == other:
                    self._files.remove(self._path)
        raise RunInUseError(f"{self._shown} was taken by another process at this very moment")

    def release(self) -> None:
        """Give the lock back if this object took it and nobody took it over."""
        if self._held is None:
            return
        with self._exclusively():
            other = self._read()
            if other is not None and other.token == self._held.token:
                self._files.remove(self._path)
        self._held = None

    def _refuse_if_alive(self, other: HolderInfo, is_alive: Callable[[HolderInfo], bool | None] | None) -> None:
        alive = other.is_alive()
        if alive is None and is_alive is not None:
            alive = is_alive(other)
        if alive is False:
            return
        if alive:
            advice = "wait for it or stop it, or give this run another name"
        else:
            advice = (
                "from here it cannot be told whether that process still lives; if it does not, delete "
                f"{self._path}, or give this run another name"
            )
        raise RunInUseError(explained(f"{self._shown} is in use by {other}: {advice}"))

    def _read(self) -> HolderInfo | None:
        """The holder; None when there is no lock, or its file means nothing (nobody can hold by that)."""
        try:
            values = json.loads(self._files.read(self._path))
            known = {field.name for field in attrs.fields(HolderInfo)}
            return HolderInfo(**{name: value for name, value in values.items() if name in known})
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return None

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """On a disk, one process at a time looks and takes over, so that two cannot both replace a dead lock."""
        if fcntl is None or not self._files.is_local:
            yield
            return
        folder = os.path.dirname(self._path)
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Some network mounts have no locks; the lock file itself is still created atomically.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def process_started(pid: int) -> str | None:
    """Start time of a process; None when there is no such process (or only its remains)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command may hold blanks and brackets; the fields after its last bracket do not.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return None
        return _process_started_without_proc(pid)
    state, started = fields[0], fields[19]  # fields 3 and 22 of proc(5)
    return None if state in (b"Z", b"X") else started.decode()


def _process_started_without_proc(pid: int) -> str | None:
    if os.name == "nt":
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            # Containers of one machine share the boot, not the numbers of their processes.
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "" if os.name == "nt" else socket.gethostname()


def _boot_identity() -> str:
    try:
        with open("/etc/machine-id") as file:
            machine_id = file.read().strip()
    except OSError:
        return ""
    return f"{socket.gethostname()} {machine_id}" if machine_id else ""


def _booted_at() -> float:
    try:
        with open("/proc/stat") as file:
            for line in file:
                if line.startswith("btime "):
                    return float(line.split()[1])
    except OSError:
        return 0.0
    return 0.0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that has no name.
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"
