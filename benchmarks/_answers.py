"""The child's half of ``_processes.Child``, and the cluster it measures on.

Runs under Ray Train's interpreter as well, so it imports nothing but the standard library and ray.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["answer_questions", "new_folder", "start_cluster", "wait_until_free"]

NUM_CPUS = 4
_SETTLED_S = 2.0
_FREE_TIMEOUT_S = 90.0


def answer_questions(answers: Mapping[str, Callable[..., dict[str, float]]]) -> None:
    """Answer the questions that come as lines of JSON on stdin, until it is closed.

    Args:
        answers: Question → function; what it returns goes to the descriptor given as first argument.
    """
    descriptor = int(sys.argv[1])
    # Ray prints what it likes to stdout, so answers have a way of their own.
    os.set_inheritable(descriptor, False)
    for line in sys.stdin:
        details = json.loads(line)
        values = answers[details.pop("question")](**details)
        os.write(descriptor, json.dumps(values).encode() + b"\n")


def start_cluster() -> None:
    """A plain local cluster of four logical CPUs, as a user has it."""
    import ray

    ray.init(address="local", num_cpus=NUM_CPUS)


def new_folder() -> Path:
    """An empty folder for the storage and the notes of one turn."""
    path = Path.cwd() / uuid.uuid4().hex[:8]
    path.mkdir()
    return path


def wait_until_free() -> int:
    """Wait until the turn before has left nothing: all CPUs free, and as many idle workers as there will be.

    Returns:
        Idle worker processes that stand ready now; a turn that finds some starts sooner.
    """
    import ray

    deadline = time.monotonic() + _FREE_TIMEOUT_S
    idle, since = _idle_workers(), time.monotonic()
    while time.monotonic() < deadline:
        now = _idle_workers()
        if now != idle or ray.available_resources().get("CPU", 0.0) < NUM_CPUS:
            idle, since = now, time.monotonic()
        if time.monotonic() - since >= _SETTLED_S:
            return idle
        time.sleep(0.1)
    raise TimeoutError(f"the cluster is still in use after {_FREE_TIMEOUT_S:g} s: {ray.available_resources()}")


def _idle_workers() -> int:
    """Idle workers of the raylet that is a child of this process; 0 where there is no /proc."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_bytes().startswith(b"ray::IDLE"):
                count += _parent(_parent(int(entry.name))) == os.getpid()
        except OSError:  # it has ended meanwhile
            continue
    return count


def _parent(pid: int) -> int:
    fields: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])
