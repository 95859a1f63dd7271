"""Storage that fails one time in three, and storage that changes what it was given."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from storage_lives import Progress, check_content, leftovers, live

from ray_lite.train.errors import CheckpointDamagedError, StorageError, UploadError
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.manifest import MANIFEST_NAME
from ray_lite.train.storage.retry import RetryPolicy
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.clock import ManualClock
from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem


@pytest.fixture(autouse=True)
def _empty_memory():
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def faulty_store(place: str, plan: FaultPlan, *, kind: str = "folders", clock: ManualClock | None = None) -> RunStore:
    inner = LocalFileSystem() if kind == "folders" else MemoryFileSystem()
    clock = clock or ManualClock()
    root = StorageRoot(place, filesystem=FaultyFileSystem(inner, plan))
    return RunStore(root, "run", retry=RetryPolicy(sleep=clock.sleep, deadline_s=None))


def run_with_faults(seed: int, place: str) -> int:
    plan = FaultPlan(seed=seed, error_rate=0.3, short_write_rate=0.1, stale_listings=True)
    store = faulty_store(place, plan, kind=("folders", "objects")[seed % 2])
    for _ in range(2):
        live(store, Progress(), num_reports=2)
    plan.error_rate = plan.short_write_rate = 0.0
    newest = store.newest_valid()
    assert newest is not None
    assert newest.report_index == 3
    store.open_checkpoint(newest).verify()
    assert leftovers(store) == []
    assert [row.report_index for row in store.read_history()] == [0, 1, 2, 3]
    return plan.num_faults


def test_runs_in_which_a_third_of_the_operations_fail_end_with_a_verified_checkpoint(tmp_path):
    assert sum(run_with_faults(seed, f"{tmp_path}/{seed}") for seed in range(10)) > 300


@pytest.mark.proof
def test_200_runs_in_which_a_third_of_the_operations_fail_end_with_a_verified_checkpoint(tmp_path):
    for seed in range(200):
        run_with_faults(seed, f"{tmp_path}/{seed}")
        MemoryFileSystem.store.clear()


def small_checkpoint(folder) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "w").write_bytes(b"weights")
    return Checkpoint.from_directory(folder)


def test_storage_that_never_works_raises_an_error_that_can_be_caught_and_names_the_path(tmp_path):
    """Case 10: then an exception the user can catch; the old checkpoint is intact, nothing half-written is there."""
    plan, clock = FaultPlan(), ManualClock()
    store = faulty_store(f"{tmp_path}/runs", plan, clock=clock)
    checkpoint = small_checkpoint(tmp_path / "source")
    part = store.upload(checkpoint, report_index=0, attempt=1)
    store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    plan.error_rate = 1.0
    with pytest.raises(UploadError, match=r"report 1 could not be stored in .*runs/run/checkpoint_000001"):
        store.upload(checkpoint, report_index=1, attempt=1)
    assert 10 < sum(clock.slept_s) < 120
    plan.error_rate = 0.0
    assert [committed.report_index for committed in store.list_checkpoints()] == [0]
    store.upload(checkpoint, report_index=2, attempt=1)


def test_two_failures_in_a_row_are_retried_with_growing_waits(tmp_path):
    plan, clock = FaultPlan(), ManualClock()
    store = faulty_store(f"{tmp_path}/runs", plan, clock=clock)
    store.check_writable()
    failures = iter([True, True])
    write = plan.write

    def fail_twice(name, path, data, put):
        if next(failures, False):
            raise ConnectionResetError("by peer")
        return write(name, path, data, put)

    plan.write = fail_twice
    store.upload(small_checkpoint(tmp_path / "source"), report_index=0, attempt=1)
    assert len(clock.slept_s) == 2
    assert clock.slept_s[0] < clock.slept_s[1]


def test_missing_permission_is_not_retried(tmp_path):
    plan, clock = FaultPlan(), ManualClock()
    store = faulty_store(f"{tmp_path}/runs", plan, clock=clock)

    def refuse(name, path, data, put):
        raise PermissionError(13, "denied", path)

    plan.write = refuse
    with pytest.raises(StorageError, match=r"storage_path '.*/runs' cannot be written: .*denied.*permissions"):
        store.check_writable()
    assert clock.slept_s == []


# Damage


def saved_run(place: str, num_reports: int = 3) -> RunStore:
    store = RunStore(StorageRoot(place), "run")
    live(store, Progress(), num_reports=num_reports, num_to_keep=None)
    return store


DAMAGES = ["bit flip", "truncation", "missing", "swapped", "extra", "longer"]


def damage(folder: str, rng: random.Random, kind: str) -> str:
    """Do one kind of damage to one file of a checkpoint, its manifest included; says what was done."""
    names = sorted(
        os.path.relpath(os.path.join(at, name), folder) for at, _, found in os.walk(folder) for name in found
    )
    name = rng.choice(names)
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    if kind == "bit flip":
        position = rng.randrange(len(data))
        data[position] ^= 1 << rng.randrange(8)
    elif kind == "truncation":
        del data[rng.randrange(len(data)) :]
    elif kind == "longer":
        data += bytes(rng.randrange(1, 20))
    elif kind == "missing":
        os.unlink(path)
        return f"{kind} {name}"
    elif kind == "swapped":
        first, second = os.path.join(folder, "shards/0"), os.path.join(folder, "shards/1")
        os.rename(first, first + ".x")
        os.rename(second, first)
        os.rename(first + ".x", second)
        return kind
    else:
        path = os.path.join(folder, rng.choice(["", "shards"]), f"extra{rng.randrange(100)}")
    with open(path, "wb") as file:
        file.write(data)
    return f"{kind} {name}"


def check_damages(place: str, count: int, seed: int) -> None:
    saved_run(f"{place}/original")
    rng = random.Random(seed)
    for number in range(count):
        copy = shutil.copytree(f"{place}/original", f"{place}/{number}")
        store = RunStore(StorageRoot(copy), "run")
        newest = store.list_checkpoints()[-1]
        what = damage(f"{copy}/run/{newest.dir_name}", rng, DAMAGES[number % len(DAMAGES)])
        valid = store.newest_valid()
        assert valid is not None, what
        assert valid.report_index == newest.report_index - 1, what
        # Training goes on from the last good one, and what it saves is good.
        progress = Progress()
        live(store, progress, num_reports=1, num_to_keep=None)
        assert progress.resumed_from == newest.report_index - 1, what
        assert store.newest_valid().report_index == newest.report_index, what
        shutil.rmtree(copy)


def test_every_damage_is_found_before_anything_is_read_and_the_next_older_checkpoint_is_used(tmp_path):
    check_damages(str(tmp_path), 60, seed=1)


@pytest.mark.proof
def test_1000_damages_are_all_found(tmp_path):
    check_damages(str(tmp_path), 1_000, seed=2)


def check_clean_loads(place: str, count: int) -> None:
    store = saved_run(place, num_reports=count)
    committed = store.list_checkpoints()
    assert len(committed) == count
    for found in committed:
        checkpoint = store.open_checkpoint(found)
        checkpoint.verify()
        check_content(checkpoint, found.report_index)
    assert store.newest_valid().report_index == count - 1


def test_a_clean_checkpoint_never_raises_an_alarm(tmp_path):
    check_clean_loads(str(tmp_path), 20)


@pytest.mark.proof
def test_1000_clean_checkpoints_never_raise_an_alarm(tmp_path):
    check_clean_loads(str(tmp_path), 1_000)


def test_the_warning_says_which_checkpoint_is_damaged_and_why(tmp_path, caplog):
    store = saved_run(str(tmp_path))
    with open(f"{tmp_path}/run/checkpoint_000002/common", "ab") as file:
        file.write(b"!")
    assert store.newest_valid().report_index == 1
    assert (
        "checkpoint_000002 is damaged and is skipped for the next older one: 'common' has 22 bytes instead of 21"
        in (caplog.text)
    )


@pytest.mark.parametrize("kind", ["bit flip", "truncation", "missing", "swapped", "longer"])
def test_a_damaged_remote_checkpoint_is_found_while_it_is_fetched(kind, tmp_path):
    """`to_directory` and `as_directory` of a remote one compare checksums on the way, and leave nothing."""
    store = saved_run(str(tmp_path))
    folder = f"{tmp_path}/run/checkpoint_000002"
    rng = random.Random(kind)
    shutil.move(f"{folder}/{MANIFEST_NAME}", f"{tmp_path}/manifest")
    damage(folder, rng, kind)
    shutil.move(f"{tmp_path}/manifest", f"{folder}/{MANIFEST_NAME}")
    remote = Checkpoint(folder, FaultyFileSystem(LocalFileSystem()))
    with pytest.raises(CheckpointDamagedError), remote.as_directory():
        pass
    with pytest.raises(CheckpointDamagedError):
        remote.to_directory(f"{tmp_path}/target")
    assert sorted(os.listdir(tmp_path)) == ["run"]
    assert store.newest_valid().report_index == 1
