"""The signs that a worker gives and takes while its train function runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from ..context.preemption import Notices, PreemptionInfo
from .control import CommandReader, Heartbeat, Stacks
from .exits import CrashFile

__all__ = ["WorkerSigns"]


class WorkerSigns:
    """Heartbeat, stacks, commands and SIGTERM of one worker, from ``setup`` to ``teardown``.

    Args:
        folder: The worker's own folder; exists.
        on_sigterm: Called once when this process is asked to end, in the reader's thread.
    """

    def __init__(self, folder: str, on_sigterm: Callable[[], None]) -> None:
        self.notices = Notices()
        self._on_sigterm = on_sigterm
        self._lock = threading.Lock()
        self._numbers: set[int] = set()
        self._pid = os.getpid()
        self._heartbeat = Heartbeat(folder)
        self._stacks = Stacks(folder)
        self._crash = CrashFile(folder)
        self._commands = CommandReader(folder, self._take)
        self._old_handler: Any = None
        self._has_handler = threading.current_thread() is threading.main_thread()
        if self._has_handler:
            self._old_handler = signal.signal(signal.SIGTERM, self._sigterm)

    def beat(self) -> None:
        """This worker moves."""
        self._heartbeat.beat()

    def close(self) -> None:
        """Put everything back as it was."""
        if self._has_handler and signal.getsignal(signal.SIGTERM) == self._sigterm:
            # A handler that was not set from Python comes back as None, and cannot be put back.
            signal.signal(signal.SIGTERM, self._old_handler or signal.SIG_DFL)
        self._commands.close()
        self._stacks.close()
        self._crash.close()

    def _sigterm(self, number: int, frame: Any) -> None:
        # Only what is safe inside a signal handler: the thread that reads commands does the rest.
        # A forked child of the train function ends as it would without us.
        if os.getpid() != self._pid:
            os._exit(128 + number)
        self._commands.send_to_self({"kind": "sigterm"})

    def told(self, command: dict[str, Any]) -> None:
        """Take a command for all ranks, which may come by several ways, once."""
        with self._lock:
            if command["number"] not in self._numbers:
                self._numbers.add(command["number"])
                self._act(command)

    def _take(self, command: dict[str, Any]) -> None:
        if "number" in command:
            self.told(command)
        else:
            self._act(command)

    def _act(self, command: dict[str, Any]) -> None:
        if command["kind"] == "sigterm":
            self._on_sigterm()
        elif command["kind"] == "preempt":
            nodes = {node: tuple(ranks) for node, ranks in command["nodes"].items()}
            info = PreemptionInfo(deadline_ms=command["deadline_ms"], preempted_node_to_ranks=nodes)
            self.notices.preempt(info, command["from_report"])
        elif command["kind"] == "stacks":
            self._stacks.write()
        elif command["kind"] == "checkpoint":
            self.notices.ask_for_checkpoint(command["from_report"])


def deadline_ms(seconds_from_now: float) -> int:
    """A moment in milliseconds since the epoch."""
    return int((time.time() + seconds_from_now) * 1_000)
