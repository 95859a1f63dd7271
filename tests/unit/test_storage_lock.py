"""One live process for a run: the second is refused, a dead one is recognised at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import attrs
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ray_lite.train.errors import RunInUseError
from ray_lite.train.storage.lock import HolderInfo
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    MemoryFileSystem.store.clear()
    yield StorageRoot(str(tmp_path)) if request.param == "local" else StorageRoot("memory://runs")
    MemoryFileSystem.store.clear()


def holder(**changes) -> HolderInfo:
    return attrs.evolve(HolderInfo.of_this_process(), token=os.urandom(8).hex(), **changes)


def test_the_second_is_refused_with_who_holds_it(root):
    first, second = RunStore(root, "run"), RunStore(root, "run")
    first.acquire()
    with pytest.raises(RunInUseError, match=rf"in use by process {os.getpid()} of .* on .*, since 2.*wait for it"):
        second.acquire()
    RunStore(root, "other").acquire()
    first.release()
    second.acquire()
    second.release()


def test_only_the_holder_gives_the_lock_back(root):
    first, second = RunStore(root, "run"), RunStore(root, "run")
    first.acquire()
    second.release()
    with pytest.raises(RunInUseError):
        second.acquire()
    first.release()
    first.release()


def test_a_dead_process_is_taken_over_at_once(root):
    RunStore(root, "run").acquire(holder=holder(pid=2**22 + 1))
    store = RunStore(root, "run")
    store.acquire()
    store.release()


def test_another_process_with_the_same_number_is_not_mistaken_for_it(root):
    RunStore(root, "run").acquire(holder=holder(process_started="12345"))
    RunStore(root, "run").acquire()


def test_an_earlier_boot_of_this_machine_is_dead(root):
    RunStore(root, "run").acquire(holder=holder(machine="earlier boot", acquired_at=1.0))
    RunStore(root, "run").acquire()


def test_a_process_of_another_machine_is_refused_unless_the_caller_knows_better(root):
    elsewhere = holder(machine="another", boot_identity="another", host="gpu-7", run_id="actor-1")
    RunStore(root, "run").acquire(holder=elsewhere)
    with pytest.raises(RunInUseError, match=r"on gpu-7.*cannot be told.*delete .*\.lock\.json"):
        RunStore(root, "run").acquire()
    with pytest.raises(RunInUseError, match="gpu-7"):
        RunStore(root, "run").acquire(is_alive=lambda other: True)
    RunStore(root, "run").acquire(is_alive=lambda other: other.run_id != "actor-1")


def test_a_lock_file_that_means_nothing_holds_nothing(root):
    store = RunStore(root, "run")
    files, folder = store._open()
    files.write(f"{folder}/.lock.json", b"{")
    store.acquire()


_HOLDER = """
import sys
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
store = RunStore(StorageRoot(sys.argv[1]), "run")
try:
    store.acquire()
    print("held", flush=True)
    sys.stdin.read()
except OSError as error:
    print(type(error).__name__, flush=True)
"""


def start(tmp_path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_process_gives_the_run_free(tmp_path):
    store = RunStore(StorageRoot(str(tmp_path)), "run")
    with start(tmp_path) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunInUseError, match=f"process {process.pid}"):
            store.acquire()
        process.send_signal(signal.SIGKILL)
    store.acquire()


def test_of_many_that_take_over_a_dead_lock_at_one_moment_one_gets_it(tmp_path):
    RunStore(StorageRoot(str(tmp_path)), "run").acquire(holder=holder(pid=2**22 + 1))
    processes = [start(tmp_path) for _ in range(4)]
    answers = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate("")
    assert sorted(answers) == ["RunInUseError"] * 3 + ["held"]
