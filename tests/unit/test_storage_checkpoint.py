"""Reading a checkpoint: any place, several readers, nothing left behind."""

from __future__ import annotations

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ray_lite.train.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem

FILES = {"w": b"weights", "sub dir/[x]*?": b"odd name", "empty": b""}


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    """So that a test can see what is left in it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture
def source(tmp_path) -> Checkpoint:
    for name, data in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return Checkpoint.from_directory(tmp_path / "source")


def committed(root: StorageRoot, source: Checkpoint) -> Checkpoint:
    store = RunStore(root, "run")
    part = store.upload(source, report_index=0, attempt=1)
    return store.open_checkpoint(
        store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    )


@pytest.fixture(params=["local", "memory", "folders"])
def checkpoint(request, tmp_path, source) -> Checkpoint:
    roots = {
        "local": StorageRoot(str(tmp_path / "store")),
        "memory": StorageRoot("memory://store"),
        "folders": StorageRoot(str(tmp_path / "store"), filesystem=FaultyFileSystem(LocalFileSystem())),
    }
    return committed(roots[request.param], source)


def read_all(folder) -> dict[str, bytes]:
    names = (os.path.join(at, name) for at, _, found in os.walk(folder) for name in found)
    return {os.path.relpath(name, folder): pathlib.Path(name).read_bytes() for name in names}


def user_files(folder) -> dict[str, bytes]:
    return {name: data for name, data in read_all(folder).items() if not name.startswith(".ray_lite")}


def test_all_ways_of_reading_give_the_files_that_were_reported(checkpoint, tmp_path):
    checkpoint.verify()
    assert checkpoint.files() == sorted(FILES)
    with checkpoint.as_directory() as folder:
        assert user_files(folder) == FILES
    assert read_all(checkpoint.to_directory()) == FILES
    assert read_all(checkpoint.to_directory(tmp_path / "a" / "b")) == FILES
    for name, data in FILES.items():
        with checkpoint.open(name) as file:
            assert file.read() == data


def test_the_user_deletes_the_reported_folder_at_once(tmp_path):
    """Case 5."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "w").write_bytes(b"x" * 100_000)
        checkpoint = committed(StorageRoot(str(tmp_path / "store")), Checkpoint.from_directory(folder))
    assert len(read_all(checkpoint.to_directory())["w"]) == 100_000


def test_from_directory_refuses_what_is_no_folder(tmp_path, monkeypatch):
    """Case 7."""
    (tmp_path / "model.pt").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"model.pt' is a file; put it into a folder"):
        Checkpoint.from_directory(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint(str(tmp_path / "model.pt"))
    with pytest.raises(CheckpointNotFoundError, match="/does/not/exist"):
        Checkpoint.from_directory("/does/not/exist")
    with pytest.raises(ConfigError, match="Checkpoint path must not be empty"):
        Checkpoint.from_directory("")
    with pytest.raises(CheckpointError, match="takes a local folder"):
        Checkpoint.from_directory("s3://bucket/x")


def test_a_missing_checkpoint_makes_nothing(tmp_path):
    missing = Checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointNotFoundError):
        missing.to_directory(tmp_path / "target")
    with pytest.raises(CheckpointNotFoundError), missing.as_directory():
        pass
    with pytest.raises(CheckpointNotFoundError):
        missing.files()
    with pytest.raises(CheckpointNotFoundError):
        missing.open("w")
    with pytest.raises(CheckpointNotFoundError):
        missing.verify()
    assert sorted(os.listdir(tmp_path)) == ["tmp"]


def test_a_folder_that_was_never_committed_can_be_read_but_not_verified(source):
    assert source.files() == sorted(FILES)
    with source.as_directory() as folder:
        assert folder == source.path
    with pytest.raises(CheckpointNotFoundError, match="never committed"):
        source.verify()


def test_to_directory_adds_to_a_folder_that_exists(checkpoint, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_bytes(b"stays")
    (tmp_path / "target" / "w").write_bytes(b"replaced")
    assert checkpoint.to_directory(tmp_path / "target") == str(tmp_path / "target")
    assert read_all(tmp_path / "target") == {**FILES, "mine": b"stays"}


def test_names_that_leave_the_checkpoint_are_refused(checkpoint):
    for name in ("../w", "/etc/passwd", "", "a/../../b"):
        with pytest.raises(ValueError, match="leaves the checkpoint"):
            checkpoint.open(name)
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.open("no_such_file")
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.open("w", "wb")


# Metadata


def test_metadata_set_before_the_report_travels_with_it(tmp_path, source):
    assert source.get_metadata() == {}
    source.set_metadata({"epoch": 1})
    source.update_metadata({"lr": 0.5})
    for root in (StorageRoot(str(tmp_path / "store")), StorageRoot("memory://store")):
        checkpoint = committed(root, source)
        assert checkpoint.get_metadata() == {"epoch": 1, "lr": 0.5}
        checkpoint.verify()


def test_metadata_set_after_the_commit_leaves_the_checkpoint_valid(checkpoint):
    checkpoint.set_metadata({"epoch": 1})
    checkpoint.update_metadata({"note": "best"})
    checkpoint.verify()
    assert checkpoint.get_metadata() == {"epoch": 1, "note": "best"}
    copy = Checkpoint(checkpoint.to_directory())
    assert copy.get_metadata() == {"epoch": 1, "note": "best"}
    assert copy.files() == sorted([*FILES, ".metadata.json"])


def test_metadata_must_fit_into_json(source):
    with pytest.raises(TypeError, match="must be a dict"):
        source.set_metadata([1])
    with pytest.raises(TypeError):
        source.set_metadata({"x": object()})
    assert source.get_metadata() == {}


# The object


def test_it_is_small_picklable_and_equal_to_the_same_place(tmp_path, source):
    local = committed(StorageRoot(str(tmp_path / "store")), source)
    other = pickle.loads(pickle.dumps(local))
    assert other == local
    assert hash(other) == hash(local)
    assert len(pickle.dumps(local)) < 1_000
    assert Checkpoint(f"file://{source.path}") == source
    assert Checkpoint(source.path, LocalFileSystem()) == source
    assert Checkpoint("s3://bucket/x") != Checkpoint("gs://bucket/x")
    assert Checkpoint("s3://bucket/x") != "s3://bucket/x"


def test_secrets_do_not_show_in_repr():
    checkpoint = Checkpoint("s3://bucket/x", storage_options={"secret": "hunter2"})
    assert "hunter2" not in repr(checkpoint)
    assert pickle.loads(pickle.dumps(checkpoint))._root.options == {"secret": "hunter2"}


def test_it_is_no_path():
    with pytest.raises(TypeError, match="as_directory"):
        os.fspath(Checkpoint("s3://bucket/x"))


@pytest.mark.parametrize("name", ["from_dict", "to_dict", "from_bytes", "uri", "from_uri", "get_preprocessor"])
def test_removed_names_tell_what_to_do_on_the_class_and_on_objects(name):
    for owner in (Checkpoint, Checkpoint("s3://bucket/x")):
        with pytest.raises(AttributeError, match=f"Checkpoint.{name} no longer exists: .*(use|keep)"):
            getattr(owner, name)


def test_a_missing_driver_says_what_to_install():
    """Case 37 and 31: on this process, without a worker."""
    with pytest.raises(StorageError, match=r"nosuch://.*known are"):
        Checkpoint("nosuch://bucket/x").files()


# Several readers


def remote(tmp_path, source, plan=None) -> Checkpoint:
    """A checkpoint that must be fetched, on a filesystem that counts."""
    filesystem = FaultyFileSystem(LocalFileSystem(), plan or FaultPlan())
    return committed(StorageRoot(str(tmp_path / "store"), filesystem=filesystem), source)


def copies() -> list[str]:
    base = os.path.join(tempfile.gettempdir(), f"ray_lite_checkpoints_{os.getuid()}")
    return sorted(os.listdir(base)) if os.path.isdir(base) else []


def test_readers_share_one_copy_and_the_last_one_removes_it(tmp_path, source):
    """Case 25."""
    plan = FaultPlan()
    checkpoint = remote(tmp_path, source, plan)
    with checkpoint.as_directory() as first:
        num_operations = sum(operation.startswith("read") for operation in plan.operations)
        with checkpoint.as_directory() as second:
            assert second == first
        assert read_all(first) == FILES
        # The second reader read the manifest only.
        assert sum(operation.startswith("read") for operation in plan.operations) == num_operations + 1
    assert copies() == []


def test_many_readers_at_once_all_see_every_file(tmp_path, source):
    checkpoint = remote(tmp_path, source)
    seen, start = [], threading.Barrier(8)

    def read():
        start.wait()
        for _ in range(10):
            with checkpoint.as_directory() as folder:
                seen.append(read_all(folder) == FILES)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 80
    assert copies() == []


def test_an_exception_in_the_block_leaves_nothing(tmp_path, source):
    checkpoint = remote(tmp_path, source)
    with pytest.raises(KeyError), checkpoint.as_directory():
        raise KeyError("user code")
    assert copies() == []


def test_a_failed_fetch_leaves_nothing_and_the_next_one_works(tmp_path, source):
    plan = FaultPlan()
    checkpoint = remote(tmp_path, source, plan)
    (tmp_path / "store/run/checkpoint_000000/w").write_bytes(b"WEIGHTS")
    with pytest.raises(CheckpointDamagedError, match="'w' has other content"), checkpoint.as_directory():
        pass
    assert copies() == []
    (tmp_path / "store/run/checkpoint_000000/w").write_bytes(b"weights")
    with checkpoint.as_directory() as folder:
        assert read_all(folder) == FILES


_READER = """
import sys
from fsspec.implementations.local import LocalFileSystem
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.testing.faulty import FaultyFileSystem
with Checkpoint(sys.argv[1], FaultyFileSystem(LocalFileSystem())).as_directory() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def start_reader(checkpoint, tmp_path):
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, checkpoint.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    return reader, reader.stdout.readline().strip()


def test_a_killed_reader_neither_blocks_others_nor_leaves_its_copy(tmp_path, source):
    checkpoint = remote(tmp_path, source)
    reader, folder = start_reader(checkpoint, tmp_path)
    with reader:
        assert read_all(folder) == FILES
        with checkpoint.as_directory() as mine:
            assert mine == folder
            reader.send_signal(signal.SIGKILL)
            reader.wait()
            assert read_all(mine) == FILES
    assert copies() == []


def test_the_copy_of_a_killed_reader_is_removed_by_the_next_reader_of_anything(tmp_path, source):
    checkpoint = remote(tmp_path, source)
    reader, _ = start_reader(checkpoint, tmp_path)
    with reader:
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    assert len(copies()) == 2
    other = committed(StorageRoot("memory://other"), source)
    with other.as_directory() as folder:
        assert read_all(folder) == FILES
    assert copies() == []


def test_a_reader_that_leaves_early_leaves_the_copy_to_the_others(tmp_path, source):
    checkpoint = remote(tmp_path, source)
    reader, folder = start_reader(checkpoint, tmp_path)
    with reader:
        with checkpoint.as_directory() as mine:
            assert mine == folder
        assert read_all(folder) == FILES
        reader.communicate("")
    assert copies() == []
