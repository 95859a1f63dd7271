"""How a process of this node ended: what the kernel knows of it, and what it has left behind itself.

Ray only says that the connection to a worker was lost. The kernel can say more, if somebody held
on to the process before it ended; and a process that crashes can write where it stood.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import struct
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["CrashFile", "Exits", "count_oom_kills", "death_detail", "describe_exit", "read_crash"]

_CRASH = "crash"
_MAX_CRASH_BYTES = 20_000
# From linux/pidfd.h: struct pidfd_info, its size in the first version that has an exit code (Linux 6.15), where
# that code lies, the mask that asks for it, and _IOWR(0xFF, 11, struct pidfd_info).
_INFO_BYTES = 72
_EXIT_CODE_AT = 60
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
_REAPED_WITHIN_S = 0.1
_CRASH_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}


class Exits:
    """Holds on to processes of this node, to learn how they end.

    Where the kernel cannot tell (Linux before 6.15, other systems), nothing is learnt.

    Args:
        pids: The processes; those that are gone already are left out.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}
        self._oom_kills = count_oom_kills()
        if hasattr(os, "pidfd_open"):
            for pid in pids:
                with contextlib.suppress(OSError):
                    self._fds[pid] = os.pidfd_open(pid)

    def status(self, pid: int) -> int | None:
        """The wait status of a process that ends just now (see ``os.waitstatus_to_exitcode``); None when unknown."""
        fd = self._fds.get(pid)
        if fd is None:
            return None
        deadline = time.monotonic() + _REAPED_WITHIN_S
        while True:
            info = bytearray(_INFO_BYTES)
            struct.pack_into("Q", info, 0, _INFO_EXIT)
            # Until its parent has taken note of the end, there is none yet; an old kernel has no such call.
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, _GET_INFO, info)
                if struct.unpack_from("Q", info, 0)[0] & _INFO_EXIT:
                    return int(struct.unpack_from("i", info, _EXIT_CODE_AT)[0])
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)

    def was_out_of_memory(self) -> bool:
        """Whether the kernel has killed any process of this machine for want of memory since."""
        return count_oom_kills() > self._oom_kills

    def close(self) -> None:
        """Let go of all."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def count_oom_kills() -> int:
    """How often the kernel of this machine has killed a process for want of memory; 0 where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def describe_exit(status: int | None, crash: str, *, was_out_of_memory: bool = False) -> str:
    """How a worker ended, in words.

    Args:
        status: Its wait status; None when unknown.
        crash: What ``CrashFile`` has kept.
        was_out_of_memory: The kernel has killed somebody on that machine for want of memory.

    Returns:
        One line. Empty when nothing is known.
    """
    code = None if status is None else os.waitstatus_to_exitcode(status & 0xFFFF)
    if code is None:
        code = next((-number for text, number in _CRASH_SIGNALS.items() if f"error: {text}" in crash), None)
    if code is None:
        if crash:
            return crash.splitlines()[0]
        return "out of memory: the kernel killed a process of its machine" if was_out_of_memory else ""
    if code >= 0:
        return f"it ended itself with exit code {code} (os._exit(), or C code that calls exit())"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name != "SIGKILL":
        meaning = signal.strsignal(-code)
        return f"killed by {name} ({meaning.lower()})" if meaning else f"killed by {name}"
    if was_out_of_memory:
        return "killed by SIGKILL: the kernel has run out of memory and killed a process"
    return "killed by SIGKILL, by somebody or by a memory limit; the kernel itself did not run out of memory"


_RAY_DETAIL = "Worker exit detail:"
_RAY_KNOWS_NOTHING = "connection error code"
_WITHOUT_A_WORD = "it went away without a word (SIGKILL, or os._exit()); out of memory is the usual cause"
_RAY_FIELDS = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:", "The actor died")


def death_detail(ray_text: str, ended: str = "") -> str:
    """Why a process is gone, in one line.

    Args:
        ray_text: What Ray's error says, or this function has made of it. Of a process that just went away, Ray
            lists what might have been.
        ended: From ``describe_exit``.
    """
    lines = [line.strip() for line in ray_text.splitlines() if line.strip()]
    kept = " ".join([line for line in lines if not line.startswith(_RAY_FIELDS)][:3])
    detail = kept.rpartition(_RAY_DETAIL)[2].strip()
    if not detail or _RAY_KNOWS_NOTHING in detail or detail == _WITHOUT_A_WORD:
        return ended or _WITHOUT_A_WORD
    return f"{ended}; {detail}" if ended else detail


class CrashFile:
    """Lets this process write its stack into a file when it crashes (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL).

    Args:
        folder: The worker's own folder; exists.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        global _open_file
        self._was_enabled = faulthandler.is_enabled()
        self._file = open(Path(folder) / _CRASH, "wb", buffering=0)  # noqa: SIM115 - open as long as the handler is set
        _forget_in_children()
        faulthandler.enable(self._file, all_threads=False)
        _open_file = self

    def close(self) -> None:
        """Put the handler back as it was."""
        global _open_file
        if _open_file is self:
            _open_file = None
            _write_to_stderr(self._was_enabled)
        self._file.close()


_open_file: CrashFile | None = None
_is_registered = False


def _forget_in_children() -> None:
    """A forked child (of a DataLoader, say) that crashes must not write into its parent's file."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    if _open_file is not None:
        _write_to_stderr(_open_file._was_enabled)


def _write_to_stderr(is_enabled: bool) -> None:
    faulthandler.disable()
    if is_enabled:
        # There may be no standard error any more.
        with contextlib.suppress(RuntimeError, AttributeError, ValueError, OSError):
            faulthandler.enable()


def read_crash(folder: str) -> str:
    """What a crashed worker of this node has written; empty when it has not crashed."""
    try:
        with open(os.path.join(folder, _CRASH), "rb") as file:
            return file.read(_MAX_CRASH_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
