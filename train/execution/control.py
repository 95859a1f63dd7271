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
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "CommandReader",
    "Heartbeat",
    "Stacks",
    "is_stopped",
    "kill_process",
    "read_heartbeat",
    "read_stacks",
    "send_command",
]

_PIPE = "commands"
_HEARTBEAT = "heartbeat"
_STACKS = "stacks"
_STACK_SIGNAL = signal.SIGUSR1
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
                command = json.loads(line)
                if command["kind"] == "close":
                    return
                self._handle(command)


def send_command(folder: str, command: dict[str, Any]) -> bool:
    """Give a worker on this node a command; False when nobody reads there any more."""
    try:
        fd = os.open(os.path.join(folder, _PIPE), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return False
        raise
    try:
        # One line below PIPE_BUF is written whole.
        os.write(fd, json.dumps(command).encode() + b"\n")
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
        path.write_bytes(struct.pack("d", time.time()))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def beat(self) -> None:
        """Say that this worker moves."""
        struct.pack_into("d", self._memory, 0, time.time())


def read_heartbeat(folder: str) -> float:
    """When a worker on this node last moved, in seconds since the epoch; 0.0 when it never said."""
    try:
        data = Path(folder, _HEARTBEAT).read_bytes()
    except FileNotFoundError:
        return 0.0
    return float(struct.unpack("d", data)[0]) if len(data) == 8 else 0.0


class Stacks:
    """Lets others see where the threads of this process stand.

    Args:
        folder: The worker's own folder; exists.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._file = open(Path(folder) / _STACKS, "wb", buffering=0)  # noqa: SIM115 - open as long as the handler is set
        faulthandler.register(_STACK_SIGNAL, file=self._file, all_threads=True)

    def close(self) -> None:
        """Take the handler away."""
        faulthandler.unregister(_STACK_SIGNAL)
        self._file.close()


def read_stacks(folder: str, pid: int) -> str:
    """The Python stacks of a worker's threads on this node, most recent call first; why not, if not."""
    if is_stopped(pid):
        return "the process is stopped (SIGSTOP, or a debugger); it cannot show its stack"
    path = Path(folder, _STACKS)
    try:
        before = path.stat().st_size
        os.kill(pid, _STACK_SIGNAL)
    except (FileNotFoundError, ProcessLookupError):
        return "the process is gone"
    deadline = time.monotonic() + _STACK_WAIT_S
    size = -1
    while time.monotonic() < deadline:
        now = path.stat().st_size
        if now > before and now == size:
            with path.open("rb") as file:
                file.seek(before)
                return file.read(_MAX_STACK_BYTES).decode(errors="replace").strip()
        size = now
        time.sleep(0.005)
    return "the process did not show its stack (its code may have replaced the handler of SIGUSR1)"


def is_stopped(pid: int) -> bool:
    """Whether a process of this node is stopped by a signal."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state in ("T", "t")


def kill_process(pid: int) -> None:
    """End a process of this node, also one that is stopped and answers nobody."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
