"""The processes that are measured: whole commands, and children that answer questions.

Each side gets a Ray of its own: a temporary folder that no other cluster knows, no address
from the environment, no token, no usage report.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Child", "run_command", "scratch"]

_HERE = Path(__file__).resolve().parent
_TAIL_CHARS = 2_000


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for storage, logs and Ray's sockets; its name is short because a socket's path must be."""
    folder = Path(tempfile.mkdtemp(prefix="b-"))
    try:
        yield folder
    finally:
        _wait_until_gone(folder)
        shutil.rmtree(folder, ignore_errors=True)


def run_command(command: Sequence[str], folder: Path, *, expect: str, timeout_s: float = 300.0) -> float:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        folder: From ``scratch()``; working folder and Ray's temporary folder.
        expect: Text that its output must hold: the work was really done.
        timeout_s: Limit.

    Returns:
        Wall time in seconds.

    Raises:
        RuntimeError: It failed, or its output does not hold ``expect``.
    """
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=timeout_s
    )
    elapsed_s = time.perf_counter() - began
    if done.returncode != 0 or expect not in done.stdout + done.stderr:
        tail = (done.stdout + done.stderr)[-_TAIL_CHARS:]
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{tail}")
    # Its cluster may still be on its way out, and would take CPU from the next turn.
    _wait_until_gone(folder)
    return elapsed_s


class Child:
    """A program of this folder that stays up and answers questions, one JSON line each (see ``_answers.py``).

    Args:
        python: Its interpreter.
        program: File name in this folder.
        folder: From ``scratch()``.
    """

    def __init__(self, python: str, program: str, folder: Path) -> None:
        self._log = folder / f"{program}.log"
        self._answers, writing = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(_HERE / program), str(writing)],
                cwd=folder,
                env=_environment(folder),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                text=True,
            )
        os.close(writing)

    def ask(self, question: str, *, timeout_s: float = 300.0, **details: Any) -> dict[str, float]:
        """Put a question and wait for the answer.

        Raises:
            RuntimeError: No answer in time, or the child failed; with the end of its output.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"question": question, **details}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._last_words(question)) from None
        data, deadline = b"", time.monotonic() + timeout_s
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._answers, 1 << 16) if ready else b""
            if not piece:
                raise RuntimeError(self._last_words(question))
            data += piece
        answer: dict[str, float] = json.loads(data)
        return answer

    def close(self) -> None:
        """Let it stop its cluster and end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_words(self, question: str) -> str:
        status = self._process.poll()
        how = "did not answer in time" if status is None else f"exited with {status}"
        text = self._log.read_text(errors="replace")[-_TAIL_CHARS:]
        return f"{self._process.args[1]} {how} at {question!r}:\n{text}"  # type: ignore[index]


def _environment(folder: Path) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "PYTHONPATH"}
    return {
        **kept,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }


def _wait_until_gone(folder: Path, timeout_s: float = 30.0) -> None:
    """Wait for the processes of a cluster whose temporary folder this is."""
    needle, deadline = str(folder).encode(), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(needle in command for command in _commands()):
            return
        time.sleep(0.05)


def _commands() -> Iterator[bytes]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if entry.parent.name == str(os.getpid()):
            continue
        try:
            yield entry.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
