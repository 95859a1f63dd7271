"""What every store promises, on every kind of storage that this machine can offer."""

from __future__ import annotations

import os
import time

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from storage_lives import Progress, check_content, leftovers, live

from ray_lite.train.errors import RunInUseError, StorageError
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.faulty import FaultyFileSystem

HARD_NAME = "a b/[x]*%41é"


@pytest.fixture(scope="module")
def s3_options():
    """A real S3 protocol server on loopback."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    import boto3

    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
    yield {"endpoint_url": url}
    server.stop()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(params=["local", "file", "memory", "folders", "s3"])
def root(request, tmp_path):
    MemoryFileSystem.store.clear()
    if request.param == "local":
        return StorageRoot.resolve(tmp_path / HARD_NAME)
    if request.param == "file":
        return StorageRoot.resolve((tmp_path / HARD_NAME).as_uri())
    if request.param == "memory":
        return StorageRoot.resolve(f"memory://{HARD_NAME}")
    if request.param == "folders":
        return StorageRoot.resolve(tmp_path / HARD_NAME, filesystem=FaultyFileSystem(LocalFileSystem()))
    return StorageRoot.resolve(f"s3://bucket/{tmp_path.name}/{HARD_NAME}", request.getfixturevalue("s3_options"))


def test_a_run_saves_ends_resumes_and_leaves_nothing_else(root):
    store = RunStore(root, "run 1")
    first, second = Progress(), Progress()
    live(store, first, num_reports=3)
    live(RunStore(root, "run 1"), second, num_reports=2)
    assert (first.resumed_from, first.committed) == (None, [0, 1, 2])
    assert (second.resumed_from, second.committed) == (2, [3, 4])
    assert [committed.report_index for committed in store.list_checkpoints()] == [4]
    assert [row.report_index for row in store.read_history()] == [0, 1, 2, 3, 4]
    assert store.read_record().state == "finished"
    assert leftovers(store) == []


def test_every_way_of_reading_gives_what_was_saved(root, tmp_path):
    store = RunStore(root, "run")
    live(store, Progress(), num_reports=1)
    checkpoint = store.open_checkpoint(store.newest_valid())
    checkpoint.verify()
    check_content(checkpoint, 0)
    check_content(Checkpoint(checkpoint.to_directory(tmp_path / "copy")), 0)
    with checkpoint.open("common") as file:
        assert file.read() == b"the same on all ranks"
    checkpoint.set_metadata({"note": "é"})
    assert checkpoint.get_metadata() == {"note": "é"}
    checkpoint.verify()


def test_a_large_file_goes_up_and_comes_back_whole(root, tmp_path):
    store = RunStore(root, "run")
    data = os.urandom(11 << 20)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big [x]*").write_bytes(data)
    part = store.upload(Checkpoint(tmp_path / "source"), report_index=0, attempt=1)
    committed = store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    assert store.newest_valid() == committed
    with store.open_checkpoint(committed).as_directory() as folder, open(f"{folder}/big [x]*", "rb") as file:
        assert file.read() == data
    assert store.delete(committed)
    assert store.newest_valid() is None


def test_the_second_live_run_is_refused(root):
    first = RunStore(root, "run")
    first.acquire()
    with pytest.raises(RunInUseError):
        RunStore(root, "run").acquire()
    first.release()
    RunStore(root, "run").acquire()


def test_a_missing_bucket_is_named_at_once_and_not_created(s3_options):
    store = RunStore(StorageRoot.resolve("s3://nobucket/x", s3_options), "run")
    start = time.perf_counter()
    with pytest.raises(StorageError, match=r"'s3://nobucket/x' cannot be written: .*bucket"):
        store.check_writable()
    assert time.perf_counter() - start < 2.0
    with pytest.raises(StorageError, match="nobucket"):
        store.check_writable()
