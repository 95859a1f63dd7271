"""A crash at every single filesystem operation of save, retention, record and resume."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_lives import Progress, check_content, leftovers, live

from ray_lite.train.storage.retry import RetryPolicy
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem, SimulatedCrash

NUM_REPORTS = 2


def make_store(kind: str, place: str, plan: FaultPlan) -> RunStore:
    """A store whose every operation goes through ``plan``; one at a time, so that a crash has one place."""
    inner = LocalFileSystem() if kind == "folders" else MemoryFileSystem()
    root = StorageRoot(place, filesystem=FaultyFileSystem(inner, plan))
    store = RunStore(root, "run", retry=RetryPolicy(max_attempts=1, deadline_s=None))
    store._open()[0].max_concurrency = 1
    return store


def empty_memory() -> None:
    """MemoryFileSystem keeps its files in the class, and looks through all of them for each listing."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Template:
    """A run of two reports, made once and copied for each crash."""

    def __init__(self, kind: str, folder: str) -> None:
        self._kind, self._folder, self._copies = kind, folder, 0
        empty_memory()
        self._place = f"{folder}/template" if kind == "folders" else "/crash"
        live(make_store(kind, self._place, FaultPlan()), Progress(), num_reports=NUM_REPORTS)
        self._objects = {path: file.getvalue() for path, file in MemoryFileSystem.store.items()}

    def copy(self) -> str:
        if self._kind == "folders":
            self._copies += 1
            return shutil.copytree(self._place, f"{self._folder}/{self._copies}")
        empty_memory()
        for path, data in self._objects.items():
            MemoryFileSystem().pipe_file(path, data)
        return self._place


@pytest.fixture(autouse=True)
def _empty_memory():
    yield
    empty_memory()


def check_next_life(store: RunStore, first: Progress, before: int | None) -> None:
    """The next process sees the newest committed checkpoint or the one just being committed, and cleans up."""
    last_known = first.committed[-1] if first.committed else before
    second = Progress()
    live(store, second, num_reports=1)
    if last_known is None:
        assert second.resumed_from in (None, 0)
    else:
        assert second.resumed_from in (last_known, last_known + 1)
    assert second.committed == [0 if second.resumed_from is None else second.resumed_from + 1]
    assert leftovers(store) == []
    checkpoints = store.list_checkpoints()
    for committed in checkpoints:
        store.open_checkpoint(committed).verify()
        check_content(store.open_checkpoint(committed), committed.report_index)
    indices = [row.report_index for row in store.read_history()]
    assert indices == sorted(set(indices))
    assert second.committed[-1] in indices


# A PUT into an object store has no middle: the object is there, or it is not.
KINDS = [
    ("objects", "before"),
    ("objects", "after"),
    ("folders", "before"),
    ("folders", "middle"),
    ("folders", "after"),
]


def crash_at_each(kind: str, when: str, folder: str, step: int) -> int:
    template = Template(kind, folder)
    clean = FaultPlan()
    live(make_store(kind, template.copy(), clean), Progress(), num_reports=NUM_REPORTS)
    num_operations = len(clean.operations)
    assert num_operations > 40
    for crash_at in range(KINDS.index((kind, when)) % step, num_operations + 5, step):
        place, progress = template.copy(), Progress()
        plan = FaultPlan(crash_at=crash_at, crash_when=when)
        try:
            live(make_store(kind, place, plan), progress, num_reports=NUM_REPORTS)
        except SimulatedCrash:
            assert plan.is_crashed
        check_next_life(make_store(kind, place, FaultPlan()), progress, before=NUM_REPORTS - 1)
    return num_operations


@pytest.mark.parametrize(("kind", "when"), KINDS)
def test_a_crash_at_an_operation_loses_nothing_committed_and_leaves_nothing_behind(kind, when, tmp_path):
    """Issue: a crash injected before, in and after operations; 0 torn loads, 0 orphans after the next save."""
    crash_at_each(kind, when, str(tmp_path), step=5)


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "when"), KINDS)
def test_a_crash_at_every_operation_loses_nothing_committed_and_leaves_nothing_behind(kind, when, tmp_path):
    crash_at_each(kind, when, str(tmp_path), step=1)


@settings(max_examples=15)
@given(crashes=st.lists(st.tuples(st.integers(0, 120), st.sampled_from(["before", "middle", "after"])), max_size=5))
def test_any_number_of_crashes_in_a_row_loses_nothing_committed(crashes):
    with tempfile.TemporaryDirectory() as place:
        last_known = None
        for crash_at, when in crashes:
            progress = Progress()
            try:
                plan = FaultPlan(crash_at=crash_at, crash_when=when)
                live(make_store("folders", place, plan), progress, num_reports=NUM_REPORTS)
            except SimulatedCrash:
                assert plan.is_crashed
            if last_known is not None and progress.committed:
                assert progress.committed[0] > last_known
            last_known = progress.committed[-1] if progress.committed else last_known
            # A crash right after a commit hides it from the process that made it.
            newest = make_store("folders", place, FaultPlan()).newest_valid()
            if last_known is not None:
                assert newest is not None
                assert newest.report_index in (last_known, last_known + 1)
            last_known = None if newest is None else newest.report_index
        check_next_life(make_store("folders", place, FaultPlan()), Progress(), before=last_known)


# What changes a disk, as CPython announces it before it happens (https://docs.python.org/3/library/audit_events.html).
_DISK_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.scandir", "shutil.rmtree"}


def _die_at_disk_operation(number: int, place: str) -> int:
    """Live once in a forked process that is killed before its ``number``-th operation on ``place``.

    Returns:
        Operations left over: 0 when it was killed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        left = number

        def hook(event: str, args: tuple) -> None:
            nonlocal left
            if event in _DISK_EVENTS and place in str(args[:2]):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        try:
            sys.addaudithook(hook)
            store = RunStore(StorageRoot(place), "run")
            live(store, Progress(), num_reports=NUM_REPORTS, on_commit=lambda index: os.write(writing, bytes([index])))
            os.write(writing, b"\xff")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    progress = Progress(committed=list(told.rstrip(b"\xff")))
    check_next_life(RunStore(StorageRoot(place), "run"), progress, before=NUM_REPORTS - 1)
    return int(told.endswith(b"\xff"))


def kill_at_each(folder: str, step: int) -> None:
    template = Template("folders", folder)
    number = 0
    while not _die_at_disk_operation(number, template.copy()):
        number += step
    assert number > 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_sigkill_before_a_disk_operation_loses_nothing_committed(tmp_path):
    """The same on the plain disk, where no fsspec is between: a real process, really killed."""
    kill_at_each(str(tmp_path), step=5)


@pytest.mark.proof
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_sigkill_before_every_disk_operation_loses_nothing_committed(tmp_path):
    kill_at_each(str(tmp_path), step=1)
