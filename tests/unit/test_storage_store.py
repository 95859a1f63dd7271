"""The folder of a run: what may be there, and what is promised about it."""

from __future__ import annotations

import logging
import os
import pathlib
import pickle
import tempfile
import threading

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ray_lite.train.errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointError,
    ConfigError,
    StorageError,
    UploadError,
)
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.manifest import MANIFEST_NAME
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.run_record import RunRecord
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem


@pytest.fixture(autouse=True)
def _empty_memory():
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["local", "memory", "folders"])
def store(request, tmp_path) -> RunStore:
    roots = {
        "local": StorageRoot(str(tmp_path / "runs")),
        "memory": StorageRoot("memory://runs"),
        "folders": StorageRoot(str(tmp_path / "runs"), filesystem=FaultyFileSystem(LocalFileSystem())),
    }
    return RunStore(roots[request.param], "run")


@pytest.fixture
def local(tmp_path) -> RunStore:
    return RunStore(StorageRoot(str(tmp_path / "runs")), "run")


def folder_of(tmp_path, **files: bytes) -> Checkpoint:
    folder = tmp_path / f"source{len(os.listdir(tmp_path))}"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return Checkpoint.from_directory(folder)


def save(store, tmp_path, index, attempt=1, dir_name=None, metrics=None, **files):
    files = files or {"w": b"%d" % index}
    part = store.upload(folder_of(tmp_path, **files), report_index=index, attempt=attempt, dir_name=dir_name)
    return store.commit(
        {0: part}, report_index=index, attempt=attempt, world_size=1, metrics=metrics or {}, created_at=float(index)
    )


def indices(store) -> list[int]:
    return [committed.report_index for committed in store.list_checkpoints()]


def test_an_upload_is_no_checkpoint_before_its_commit(store, tmp_path):
    part = store.upload(folder_of(tmp_path, w=b"1"), report_index=0, attempt=1)
    assert store.list_checkpoints() == []
    assert store.newest_valid() is None
    committed = store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={"a": 1}, created_at=5.0)
    assert store.list_checkpoints() == [committed]
    assert store.newest_valid() == committed
    assert committed.manifest.metrics == {"a": 1}
    assert committed.path == store.open_checkpoint(committed).path


def test_any_subset_of_ranks_may_bring_files(store, tmp_path):
    """Case 3."""
    part = store.upload(folder_of(tmp_path, w=b"1"), report_index=0, attempt=1)
    committed = store.commit({1: part}, report_index=0, attempt=1, world_size=2, metrics={}, created_at=0.0)
    assert committed.manifest.ranks == {1: 1}
    assert store.open_checkpoint(committed).files() == ["w"]
    with pytest.raises(CheckpointError, match="no rank brought a checkpoint"):
        store.commit({}, report_index=1, attempt=1, world_size=2, metrics={}, created_at=0.0)


def test_a_file_from_all_ranks_is_one_whole_file_or_a_conflict(store, tmp_path):
    """Case 4."""
    parts = {
        rank: store.upload(folder_of(tmp_path, model=b"same" * 1000), report_index=0, attempt=1) for rank in range(4)
    }
    committed = store.commit(parts, report_index=0, attempt=1, world_size=4, metrics={}, created_at=0.0)
    store.open_checkpoint(committed).verify()
    parts = {
        rank: store.upload(folder_of(tmp_path, model=b"%d" % rank), report_index=1, attempt=1) for rank in range(2)
    }
    with pytest.raises(CheckpointConflictError, match="ranks 0 and 1"):
        store.commit(parts, report_index=1, attempt=1, world_size=2, metrics={}, created_at=0.0)
    assert indices(store) == [0]


def test_leftovers_of_a_dead_attempt_never_mix_with_the_next(store, tmp_path):
    """Case 1: a lost worker of attempt 1 writes even while attempt 2 commits."""
    store.upload(folder_of(tmp_path, old=b"1"), report_index=0, attempt=1)
    part = store.upload(folder_of(tmp_path, new=b"2"), report_index=0, attempt=2)
    store.upload(folder_of(tmp_path, late=b"3"), report_index=0, attempt=1)
    committed = store.commit({0: part}, report_index=0, attempt=2, world_size=1, metrics={}, created_at=0.0)
    assert store.open_checkpoint(committed).files() == ["new"]
    store.open_checkpoint(committed).verify()
    assert store.remove_orphans(before_attempt=2) == ["checkpoint_000000"]
    assert store.list_checkpoints() == [committed]


def test_orphans_are_removed_and_nothing_else(store, tmp_path):
    committed = save(store, tmp_path, 0)
    store.upload(folder_of(tmp_path, w=b"1"), report_index=1, attempt=1)
    store.upload(folder_of(tmp_path, w=b"1"), report_index=1, attempt=2)
    store.upload(folder_of(tmp_path, w=b"1"), report_index=2, attempt=1, dir_name="mine")
    files, folder = store._open()
    files.write(f"{folder}/notes.txt", b"the user's")
    files.write(f"{folder}/plots/loss.png", b"the user's")
    assert sorted(store.remove_orphans(before_attempt=2)) == ["checkpoint_000001", "mine"]
    assert sorted(store.remove_orphans(before_attempt=3)) == ["checkpoint_000001_attempt_2"]
    assert store.list_checkpoints() == [committed]
    assert files.read(f"{folder}/notes.txt") == files.read(f"{folder}/plots/loss.png") == b"the user's"


def test_the_reported_folder_is_left_untouched(local, tmp_path):
    """Case 6."""
    source = folder_of(tmp_path, keep=b"1")
    for index in range(3):
        local.upload(source, report_index=index, attempt=1)
    assert os.listdir(source.path) == ["keep"]


def test_reporting_the_run_folder_or_one_above_is_refused(local, tmp_path):
    """Case 6: rather than copying it into itself."""
    save(local, tmp_path, 0)
    for folder in (local.path, str(tmp_path), f"{local.path}/checkpoint_000001"):
        os.makedirs(folder, exist_ok=True)
        with pytest.raises(UploadError, match="holds the place where it would be stored"):
            local.upload(Checkpoint(folder), report_index=1, attempt=1)


def test_a_committed_checkpoint_can_be_reported_again(store, tmp_path):
    first = save(store, tmp_path, 0)
    store.open_checkpoint(first).set_metadata({"a": 1})
    part = store.upload(store.open_checkpoint(first), report_index=1, attempt=1)
    second = store.commit({0: part}, report_index=1, attempt=1, world_size=1, metrics={}, created_at=0.0)
    store.open_checkpoint(second).verify()
    assert store.delete(first)
    assert store.newest_valid() == second


@pytest.mark.parametrize("what", ["missing", "file", "pipe", "broken link", "loop"])
def test_what_cannot_be_copied_is_named(what, local, tmp_path):
    folder = tmp_path / "source"
    if what == "file":
        folder.write_bytes(b"1")
        with pytest.raises(CheckpointError, match="put it into a folder"):
            Checkpoint(folder)
        return
    if what != "missing":
        folder.mkdir()
    if what == "pipe":
        os.mkfifo(folder / "odd")
    elif what == "broken link":
        (folder / "odd").symlink_to("nowhere")
    elif what == "loop":
        (folder / "odd").symlink_to(folder)
    with pytest.raises(UploadError, match="source"):
        local.upload(Checkpoint(folder), report_index=0, attempt=1)
    assert local.list_checkpoints() == []


def test_links_are_followed(local, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "w").write_bytes(b"1")
    source = folder_of(tmp_path, own=b"2")
    os.symlink(tmp_path / "shared", f"{source.path}/linked")
    os.symlink(tmp_path / "shared" / "w", f"{source.path}/link")
    part = local.upload(source, report_index=0, attempt=1)
    assert [file.path for file in part.files] == ["link", "linked/w", "own"]
    assert not os.path.islink(f"{local.path}/checkpoint_000000/link")


def test_a_large_file_has_the_same_checksum_on_every_way(store, tmp_path):
    data = os.urandom(9 << 20)
    source = folder_of(tmp_path, big=data, small=b"1")
    part = store.upload(source, report_index=0, attempt=1)
    later = store.upload(source, report_index=1, attempt=1, digests=False)
    assert [file.crc32 for file in store.add_digests(later).files] == [file.crc32 for file in part.files]
    committed = store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    store.open_checkpoint(committed).verify()
    assert pathlib.Path(store.open_checkpoint(committed).to_directory(tmp_path / "t") + "/big").read_bytes() == data


def test_a_failed_upload_leaves_nothing_of_it(tmp_path):
    plan = FaultPlan()
    root = StorageRoot(str(tmp_path / "runs"), filesystem=FaultyFileSystem(LocalFileSystem(), plan))
    store = RunStore(root, "run")
    store.upload(folder_of(tmp_path, other=b"of rank 0"), report_index=0, attempt=1)
    write = plan.write

    def refuse_b(name, path, data, put):
        if path.endswith("/b"):
            raise PermissionError(13, "denied", path)
        return write(name, path, data, put)

    plan.write = refuse_b
    with pytest.raises(UploadError, match=r"denied.*permissions"):
        store.upload(folder_of(tmp_path, a=b"1", b=b"2"), report_index=0, attempt=1)
    assert os.listdir(tmp_path / "runs/run/checkpoint_000000") == ["other"]


def test_files_that_vanish_before_the_commit_stop_it(store, tmp_path):
    part = store.upload(folder_of(tmp_path, a=b"1", b=b"22"), report_index=0, attempt=1)
    files, folder = store._open()
    files.remove(f"{folder}/checkpoint_000000/b")
    with pytest.raises(CheckpointDamagedError, match="'b' should have 2 bytes and is missing"):
        store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    assert store.list_checkpoints() == []


def test_the_commit_takes_away_what_failed_uploads_left(store, tmp_path):
    part = store.upload(folder_of(tmp_path, a=b"1"), report_index=0, attempt=1)
    files, folder = store._open()
    files.write(f"{folder}/checkpoint_000000/.tmp-0123", b"half")
    committed = store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    store.open_checkpoint(committed).verify()


# Staging


def test_staged_files_become_the_checkpoint_without_a_copy(local):
    folder = pathlib.Path(local.staging_directory(attempt=1))
    (folder / "sub").mkdir()
    (folder / "sub" / "w").write_bytes(b"weights")
    number = (folder / "sub" / "w").stat().st_ino
    part = local.add_digests(local.upload(Checkpoint(folder), report_index=0, attempt=1, digests=False))
    committed = local.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    local.open_checkpoint(committed).verify()
    assert os.stat(f"{committed.path}/sub/w").st_ino == number
    assert not (folder / "sub" / "w").exists()
    assert local.list_checkpoints() == [committed]
    assert local.remove_orphans(before_attempt=1) == []
    assert local.remove_orphans(before_attempt=2) == [folder.name]
    assert sorted(os.listdir(local.path)) == ["checkpoint_000000"]


def test_a_staged_upload_that_fails_gives_the_files_back(local):
    folder = pathlib.Path(local.staging_directory(attempt=1))
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(b"1")
    os.makedirs(f"{local.path}/checkpoint_000000/b")
    with pytest.raises(UploadError, match="could not be stored"):
        local.upload(Checkpoint(folder), report_index=0, attempt=1)
    assert sorted(os.listdir(folder)) == ["a", "b", "c"]


def test_checkpoints_that_share_a_file_by_hard_link_outlive_each_other(local):
    for index in range(3):
        folder = pathlib.Path(local.staging_directory(attempt=1))
        if index == 0:
            (folder / "frozen").write_bytes(b"unchanged")
        else:
            os.link(f"{local.path}/checkpoint_{index - 1:06d}/frozen", folder / "frozen")
        (folder / "w").write_bytes(b"%d" % index)
        part = local.upload(Checkpoint(folder), report_index=index, attempt=1)
        local.commit({0: part}, report_index=index, attempt=1, world_size=1, metrics={}, created_at=0.0)
    first, second, third = local.list_checkpoints()
    assert os.stat(f"{first.path}/frozen").st_nlink == 3
    assert local.delete(first)
    assert local.delete(third)
    local.open_checkpoint(second).verify()


def test_a_staging_folder_for_remote_storage_is_an_ordinary_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = RunStore(StorageRoot("memory://runs"), "run")
    folder = pathlib.Path(store.staging_directory(attempt=1))
    (folder / "w").write_bytes(b"weights")
    part = store.upload(Checkpoint(folder), report_index=0, attempt=1)
    store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    assert (folder / "w").read_bytes() == b"weights"
    assert store.newest_valid() is not None


# Names that the user chose


def test_a_name_that_the_user_chose_is_the_folder(store, tmp_path):
    committed = save(store, tmp_path, 0, dir_name=store.checkpoint_dir_name(0, 1, "epoch 1"))
    assert committed.dir_name == "epoch 1"
    store.open_checkpoint(committed).verify()
    assert store.newest_valid() == committed
    assert store.checkpoint_dir_name(0, 2, "epoch 1") == "epoch 1_attempt_2"


def test_a_name_used_twice_is_refused_and_the_first_checkpoint_stays(store, tmp_path):
    """Weakness W3: retention of the old one would delete the new one's files."""
    first = save(store, tmp_path, 0, dir_name="same")
    with pytest.raises(UploadError, match="another checkpoint_dir_name"):
        save(store, tmp_path, 1, dir_name="same")
    store.open_checkpoint(first).verify()
    with pytest.raises(CheckpointConflictError, match="committed checkpoint"):
        save(store, tmp_path, 2, dir_name=None) and save(store, tmp_path, 2, dir_name=None)


def test_a_folder_of_the_user_is_not_taken_for_a_checkpoint(store, tmp_path):
    files, folder = store._open()
    files.write(f"{folder}/plots/loss.png", b"the user's")
    with pytest.raises(UploadError, match="holds other files"):
        save(store, tmp_path, 0, dir_name="plots")
    assert files.read(f"{folder}/plots/loss.png") == b"the user's"


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "", "metrics", "run.json"])
def test_names_that_do_harm_are_refused(name, local, tmp_path):
    with pytest.raises((ConfigError, UploadError), match="checkpoint_dir_name"):
        local.upload(folder_of(tmp_path, w=b"1"), report_index=0, attempt=1, dir_name=name)


def test_adopt_takes_what_the_users_code_stored_in_the_run(store, tmp_path):
    files, folder = store._open()
    files.write(f"{folder}/mine/a/w", b"stored by the user")
    part = store.adopt(store.open_checkpoint_dir("mine"), report_index=0, attempt=1)
    committed = store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    store.open_checkpoint(committed).verify()
    assert store.open_checkpoint(committed).files() == ["a/w"]
    with pytest.raises(UploadError, match="must lie directly in"):
        store.adopt(folder_of(tmp_path, w=b"1"), report_index=1, attempt=1)


# Deleting


def test_a_checkpoint_that_somebody_else_removed_is_no_failure(store, tmp_path):
    """Case 18."""
    committed = save(store, tmp_path, 0)
    files, folder = store._open()
    files.remove_tree(f"{folder}/{committed.dir_name}")
    assert store.delete(committed)
    assert store.newest_valid() is None


def test_a_failed_delete_is_a_warning(tmp_path, caplog):
    """Case 18."""
    plan = FaultPlan()
    root = StorageRoot(str(tmp_path / "runs"), filesystem=FaultyFileSystem(LocalFileSystem(), plan))
    store = RunStore(root, "run")
    committed = save(store, tmp_path, 0)
    plan.run = lambda name, path, operation: (_ for _ in ()).throw(PermissionError(13, "denied", path))
    assert not store.delete(committed)
    assert "checkpoint_000000 could not be deleted: [Errno 13] denied" in caplog.text
    assert store.remove_orphans(before_attempt=9) == []


def test_what_the_run_did_not_create_is_never_deleted(store, tmp_path):
    """Case 16."""
    part = store.upload(folder_of(tmp_path, w=b"1"), report_index=0, attempt=1)
    committed = store.commit(
        {0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0, is_deletable=False
    )
    assert not store.delete(committed)
    assert store.newest_valid() == committed


def test_folders_that_changed_places_are_left_out(local, tmp_path, caplog):
    save(local, tmp_path, 0)
    save(local, tmp_path, 1)
    first, second = (f"{local.path}/checkpoint_00000{index}" for index in range(2))
    os.rename(first, first + "x")
    os.rename(second, first)
    os.rename(first + "x", second)
    assert local.list_checkpoints() == []
    assert "folders were mixed up" in caplog.text


def test_a_write_that_was_cut_off_costs_no_checkpoint(store, tmp_path):
    committed = save(store, tmp_path, 0)
    files, folder = store._open()
    for name in (
        f"{committed.dir_name}/.tmp-0123456789abcdef",
        ".tmp-0123456789abcdef",
        "metrics/.tmp-0123456789abcdef",
    ):
        files.write(f"{folder}/{name}", b"half")
    store.open_checkpoint(committed).verify()
    assert store.newest_valid() == committed
    assert sorted(store.remove_orphans(before_attempt=2)) == [".tmp-0123456789abcdef", "metrics/.tmp-0123456789abcdef"]


# The record


def record(**changes) -> RunRecord:
    values = {
        "name": "run",
        "attempt": 4,
        "state": "running",
        "started_at": 1.0,
        "updated_at": 2.0,
        "world_size": 2,
        "next_report_index": 3,
    }
    return RunRecord(**(values | changes))


def test_the_record_is_replaced_and_read_back(store):
    assert store.read_record() is None
    store.write_record(record())
    store.write_record(record(state="finished"))
    assert store.read_record() == record(state="finished")


@pytest.mark.parametrize("damaged", [b"", b"{", b"\x00" * 100])
def test_a_damaged_record_is_rebuilt_from_the_checkpoints(damaged, store, tmp_path, caplog):
    """Case 40's last line, and weakness W4."""
    save(store, tmp_path, 5, attempt=3, metrics={"loss": 0.5})
    store.upload(folder_of(tmp_path, w=b"1"), report_index=6, attempt=7)
    store.write_record(record())
    files, folder = store._open()
    files.write(f"{folder}/run.json", damaged)
    assert store.read_record() is None
    assert "rebuilt from the checkpoints" in caplog.text
    rebuilt = store.rebuild_record()
    assert (rebuilt.attempt, rebuilt.next_report_index, rebuilt.metrics) == (7, 6, {"loss": 0.5})
    assert store.last_attempt() == 7


def test_nothing_can_be_rebuilt_from_nothing(store):
    assert store.rebuild_record() is None
    assert store.last_attempt() == 0


# Before the run


@pytest.mark.parametrize("kind", ["a file in the way", "no permission"])
def test_a_path_that_cannot_be_written_says_which_and_why(kind, tmp_path):
    if kind == "a file in the way":
        (tmp_path / "runs").write_bytes(b"")
    elif os.getuid() == 0:
        pytest.skip("nothing is forbidden to root")
    else:
        (tmp_path / "runs").mkdir(mode=0o555)
    store = RunStore(StorageRoot(str(tmp_path / "runs")), "run")
    with pytest.raises(StorageError, match=r"storage_path '.*/runs' cannot be written: .*; check"):
        store.check_writable()


def test_check_writable_makes_the_folder_and_leaves_nothing(local):
    local.check_writable()
    assert os.listdir(local.path) == []


def test_an_unknown_protocol_and_a_missing_driver_fail_with_what_to_do():
    """Case 31."""
    with pytest.raises(StorageError, match=r"no filesystem is registered for nosuch://; known are .*s3"):
        RunStore(StorageRoot.resolve("nosuch://x"), "run").check_writable()
    with pytest.raises(StorageError, match=r"driver for oss:// is not installed here; pip install 'ossfs'"):
        RunStore(StorageRoot.resolve("oss://x"), "run").check_writable()


def test_a_store_is_picklable_and_shows_no_secret(tmp_path):
    store = RunStore(StorageRoot("s3://bucket", {"secret": "hunter2"}), "run")
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.path, copy.root.options) == ("s3://bucket/run", {"secret": "hunter2"})
    assert "hunter2" not in repr(copy) + repr(copy.root)


def test_run_names_that_leave_the_storage_path_are_refused(tmp_path):
    for name in ("../x", "a/b", "..", ""):
        with pytest.raises(ConfigError):
            RunStore(StorageRoot(str(tmp_path)), name)


# Cost


class Counting(LocalFileSystem):
    """Case 9: what a rank asks of a store with folders."""

    protocol = "counting"
    cachable = False

    def __init__(self):
        super().__init__()
        self.asked = []

    def makedirs(self, path, exist_ok=False):
        self.asked.append("makedirs")
        super().makedirs(path, exist_ok=exist_ok)

    def exists(self, path, **kwargs):
        self.asked.append("exists")
        return super().exists(path, **kwargs)


def test_folders_are_made_only_when_missing_and_never_probed(tmp_path):
    filesystem = Counting()
    store = RunStore(StorageRoot(str(tmp_path / "runs"), filesystem=filesystem), "run")
    store.check_writable()
    for index in range(5):
        parts = {
            rank: store.upload(folder_of(tmp_path, **{f"p{rank}": b"1"}), report_index=index, attempt=1)
            for rank in range(4)
        }
        store.commit(parts, report_index=index, attempt=1, world_size=4, metrics={}, created_at=0.0)
    assert filesystem.asked == ["makedirs"] * 6


def test_a_commit_looks_at_its_own_folder_only(tmp_path):
    """Weakness W20: the same operations for the third commit and for the thirtieth."""
    plan = FaultPlan()
    store = RunStore(StorageRoot("/runs", filesystem=FaultyFileSystem(MemoryFileSystem(), plan)), "run")
    counts = []
    for index in range(30):
        before = len(plan.operations)
        save(store, tmp_path, index)
        counts.append(len(plan.operations) - before)
        assert not [name for name in plan.operations[before:] if f"checkpoint_{index:06d}" not in name]
    assert len(set(counts)) == 1
    assert counts[0] <= 6


def test_ranks_upload_at_the_same_time(store, tmp_path):
    sources = [folder_of(tmp_path, **{f"{rank}_{n}": b"%d" % n for n in range(20)}) for rank in range(4)]
    parts = {}

    def upload(rank):
        parts[rank] = store.upload(sources[rank], report_index=0, attempt=1)

    threads = [threading.Thread(target=upload, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    committed = store.commit(parts, report_index=0, attempt=1, world_size=4, metrics={}, created_at=0.0)
    assert len(committed.manifest.files) == 80
    store.open_checkpoint(committed).verify()


def test_nothing_is_logged_in_a_clean_run(store, tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        for index in range(3):
            save(store, tmp_path, index)
        store.delete(store.list_checkpoints()[0])
        store.newest_valid()
    assert [entry for entry in caplog.records if entry.name.startswith("ray_lite")] == []


def test_a_manifest_alone_is_not_believed(store, tmp_path):
    committed = save(store, tmp_path, 0)
    save(store, tmp_path, 1)
    files, folder = store._open()
    files.remove(f"{folder}/checkpoint_000001/w")
    assert store.newest_valid(verify="size") == committed
    files.write(f"{folder}/checkpoint_000000/{MANIFEST_NAME}", b"{}")
    assert store.newest_valid() is None
