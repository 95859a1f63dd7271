"""The way from the controller to a worker whose main thread is busy: a pipe on the worker's node.

Ray runs one method of a plain actor at a time, and that one is the train function. So the
worker reads commands from a named pipe in a thread of its own; the controller, or a short
task on the worker's node, writes one line into it. Nothing polls, and no call of a rank
waits inside the controller.

The same folder holds the worker's heartbeat and, when asked for, the stacks of its threads:
``faulthandler`` writes them from a signal handler in C, so a loop that never gives the GIL
back can be seen too.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import mmap
import os
import secrets
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ..storage.lock import process_started

__all__ = [
    "CommandReader",
    "Heartbeat",
    "Process",
    "Stacks",
    "kill_if_stopped",
    "read_stacks",
    "seconds_since_heartbeat",
    "send_command",
]

logger = logging.getLogger("ray_lite.train")

_PIPE = "commands"
_HEARTBEAT = "heartbeat"
_STACKS = "stacks"
_STACK_SIGNAL = signal.SIGUSR1
_ANSWER_WAIT_S = 1.0
_STACK_WAIT_S = 2.0
_MAX_STACK_BYTES = 200_000


class CommandReader:
    """Reads commands for this worker until it is closed.

    Args:
        folder: The worker's own folder; exists.
        handle: Called with each command, in the reader's thread.
    """

    def __init__(self, folder: str | os.PathLike[str], handle: Callable[[dict[str, Any]], None]) -> None:
        self._path = Path(folder) / _PIPE
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        # Read and write: so that it never sees the end of the file when a writer leaves.
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._handle = handle
        self._thread = threading.Thread(target=self._run, name="ray_lite-commands", daemon=True)
        self._thread.start()

    def send_to_self(self, command: dict[str, Any]) -> None:
        """Queue a command from inside this process; safe in a signal handler."""
        os.write(self._fd, json.dumps(command).encode() + b"\n")

    def close(self) -> None:
        """End the thread and remove the pipe."""
        if self._fd >= 0:
            self.send_to_self({"kind": "close"})
            self._thread.join()
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        rest = b""
        while True:
            rest += os.read(self._fd, 65_536)
            *lines, rest = rest.split(b"\n")
            for line in lines:
                try:
                    command = json.loads(line)
                    if command["kind"] == "close":
                        return
                    self._handle(self._whole(command))
                # The thread must live: what it is told next may be that the node goes away.
                except Exception:
                    logger.exception("a command for this worker was not understood: %.200r", line)

    def _whole(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["kind"] != "file":
            return command
        path = self._path.parent / command["name"]
        whole: dict[str, Any] = json.loads(path.read_bytes())
        path.unlink()
        return whole


def send_command(folder: str, command: dict[str, Any]) -> bool:
    """Give a worker on this node a command; False when nobody reads there (any more, or for now)."""
    try:
        fd = os.open(os.path.join(folder, _PIPE), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return False
        raise
    try:
        line = json.dumps(command).encode() + b"\n"
        if len(line) > select.PIPE_BUF:
            # Only what is no longer than that is written whole or not at all.
            name = f"command-{secrets.token_hex(8)}"
            Path(folder, name).write_bytes(line)
            line = json.dumps({"kind": "file", "name": name}).encode() + b"\n"
        os.write(fd, line)
    except BlockingIOError:
        # Full: a process that is stopped has not read for a long time.
        return False
    finally:
        os.close(fd)
    return True


class Heartbeat:
    """The last sign of life of a worker, in memory shared with whoever asks.

    Args:
        folder: The worker's own folder; exists.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / _HEARTBEAT
        path.write_bytes(struct.pack("d", time.monotonic()))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def beat(self) -> None:
        """Say that this worker moves."""
        struct.pack_into("d", self._memory, 0, time.monotonic())


def seconds_since_heartbeat(folder: str) -> float:
    """Seconds since a worker on this node has moved; infinite when it never said.

    An age, not a moment: the clocks of two machines need not agree. On one machine all processes
    share the clock that only grows.
    """
    try:
        data = Path(folder, _HEARTBEAT).read_bytes()
    except FileNotFoundError:
        return float("inf")
    return max(0.0, time.monotonic() - struct.unpack("d", data)[0]) if len(data) == 8 else float("inf")


@attrs.frozen
class Process:
    """A process of a node, told from a later one that got the same id.

    Attributes:
        pid: Its id.
        started: Its start time, as ``process_started`` gives it.
    """

    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        return cls(os.getpid(), process_started(os.getpid()) or "")

    def is_alive(self) -> bool:
        """Whether it still runs; only on its own node."""
        return process_started(self.pid) == self.started

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state in ("T", "t") and self.is_alive()


class Stacks:
    """Lets others see where the threads of this process stand.

    Args:
        folder: The worker's own folder; exists.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._file = open(Path(folder) / _STACKS, "wb", buffering=0)  # noqa: SIM115 - open as long as the handler is set
        faulthandler.register(_STACK_SIGNAL, file=self._file, all_threads=True)

    def write(self) -> None:
        """Write them now, from a thread of this process."""
        faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """Take the handler away."""
        faulthandler.unregister(_STACK_SIGNAL)
        self._file.close()


def read_stacks(folder: str, process: Process, may_signal: bool) -> str:
    """The Python stacks of a worker's threads on this node, most recent call first; why not, if not.

    Args:
        folder: The worker's own folder.
        process: The worker.
        may_signal: Whether to send the process a signal when it does not answer. That shows a loop in C that
            holds the GIL, but code that has put a handler of its own in the place would take it for something else.
    """
    if process.is_stopped():
        return "the process is stopped (SIGSTOP, or a debugger); it cannot show its stack"
    if not process.is_alive():
        return "the process is gone"
    path = Path(folder, _STACKS)
    try:
        before = path.stat().st_size
        # A thread of the worker writes them, where it gets to run.
        if send_command(folder, {"kind": "stacks"}) and (found := _new_text(path, before, _ANSWER_WAIT_S)):
            return found
        if not may_signal:
            return "the process does not answer: code in C holds the GIL, or the machine is overloaded"
        os.kill(process.pid, _STACK_SIGNAL)
        found = _new_text(path, before, _STACK_WAIT_S)
    except FileNotFoundError:
        return "its folder is gone (somebody has cleaned up the temporary files of its node)"
    except ProcessLookupError:
        return "the process is gone"
    return found or "the process did not show its stack (its code may have replaced the handler of SIGUSR1)"


def _new_text(path: Path, before: int, timeout_s: float) -> str:
    """What is written to a file after its first ``before`` bytes, once it has come to rest; empty when nothing is."""
    deadline = time.monotonic() + timeout_s
    size = -1
    while time.monotonic() < deadline:
        now = path.stat().st_size
        if now > before and now == size:
            with path.open("rb") as file:
                file.seek(before)
                return file.read(_MAX_STACK_BYTES).decode(errors="replace").strip()
        size = now
        time.sleep(0.005)
    return ""


def kill_if_stopped(process: Process) -> None:
    """End a process of this node that is stopped, and so does not hear that it is to end."""
    if process.is_stopped():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
