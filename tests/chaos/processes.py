"""Processes of their own for what cannot be done to the test's own process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from sessions import processes_of

__all__ = ["Child", "say"]

_TESTS = Path(__file__).resolve().parent.parent


def say(**values: Any) -> None:
    """Tell the test, from a script."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class Child:
    """A Python script in a session of its own, that prints JSON lines."""

    def __init__(self, script: str, *args: str) -> None:
        folders = [str(_TESTS / name) for name in ("", "cluster", "chaos")]
        self._process = subprocess.Popen(
            [sys.executable, str(_TESTS / "chaos" / script), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "RAY_AUTH_MODE": "disabled"},
            start_new_session=True,
        )
        self.session = self._process.pid
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=self._read_lines), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def read(self, timeout_s: float) -> dict[str, Any]:
        """The next JSON line."""
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(f"no line within {timeout_s:g} s\n{self._end()}") from None
            if line is None:
                raise AssertionError(f"the script has ended\n{self._end()}")
            if line.startswith("{"):
                return dict(json.loads(line))

    def interrupt(self) -> None:
        """As Ctrl-C at a terminal: the whole foreground group gets it."""
        os.killpg(self.session, signal.SIGINT)

    def finish(self, timeout_s: float) -> None:
        """Wait for its end, which must be a good one."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished within {timeout_s:g} s\n{self._end()}") from None
        assert code == 0, f"exit {code}\n{self._end()}"
        self._close()

    def _end(self) -> str:
        for pid in processes_of(self.session):
            os.kill(pid, signal.SIGKILL)
        self._close()
        return "".join(self._errors)[-6_000:]

    def _close(self) -> None:
        self._process.wait()
        for reader in self._readers:
            reader.join()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)
