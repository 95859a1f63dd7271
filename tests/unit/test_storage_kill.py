"""Real processes, killed at random moments while they save."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from storage_lives import Progress, check_content, leftovers, live

from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

_SAVER = """
import sys
sys.path.insert(0, sys.argv[2])
from storage_lives import Progress, live
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
store = RunStore(StorageRoot(sys.argv[1]), "run")
sys.stdin.readline()
live(store, Progress(), num_reports=1_000_000, num_to_keep=2, on_commit=lambda index: print(index, flush=True))
"""


def kill_while_saving(place: str, moments_s: list[float]) -> int:
    """Kill a saving process after each of ``moments_s``; returns the newest checkpoint at the end."""
    last_known = -1
    tests = os.path.dirname(os.path.dirname(__file__))
    for moment_s in moments_s:
        command = [sys.executable, "-c", _SAVER, place, tests]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
            # Begins when told to, so that the moment falls into the work and not into the imports.
            saver.stdin.write("\n")
            saver.stdin.flush()
            told = []
            first = saver.stdout.readline()
            told.append(first)
            deadline = time.perf_counter() + moment_s
            while time.perf_counter() < deadline:
                told.append(saver.stdout.readline())
            saver.send_signal(signal.SIGKILL)
            told += saver.stdout.readlines()
        numbers = [int(text) for text in told if text.strip() and text.endswith("\n")]
        # It began where the one before ended, or one after what that one could still tell.
        assert numbers[0] in (last_known + 1, last_known + 2)
        store = RunStore(StorageRoot(place), "run")
        newest = store.newest_valid()
        assert newest is not None
        assert newest.report_index in (numbers[-1], numbers[-1] + 1)
        for committed in store.list_checkpoints():
            check_content(store.open_checkpoint(committed), committed.report_index)
        last_known = newest.report_index - 1 if newest.report_index == numbers[-1] + 1 else newest.report_index
    return last_known


def test_processes_killed_while_they_save_lose_nothing(tmp_path):
    rng = random.Random(0)
    kill_while_saving(str(tmp_path), [rng.random() * 0.05 for _ in range(5)])
    store = RunStore(StorageRoot(str(tmp_path)), "run")
    live(store, Progress(), num_reports=1)
    assert leftovers(store) == []


@pytest.mark.proof
def test_100_processes_killed_while_they_save_lose_nothing(tmp_path):
    rng = random.Random(1)
    kill_while_saving(str(tmp_path), [rng.random() * 0.1 for _ in range(100)])
    store = RunStore(StorageRoot(str(tmp_path)), "run")
    live(store, Progress(), num_reports=1)
    assert leftovers(store) == []
