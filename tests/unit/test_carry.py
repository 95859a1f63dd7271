"""Files carried to another node's disk, without the nodes: the two ends are joined by a plain call."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from pathlib import Path
from typing import Any

import attrs
import pytest
from storage_lives import Progress, leftovers, live

from ray_lite.train.errors import CheckpointDamagedError, CheckpointNotFoundError, UploadError
from ray_lite.train.execution.carrier import PIECE_BYTES, Carrier
from ray_lite.train.execution.carry import CarryFileSystem
from ray_lite.train.execution.probe import Probe, as_seen_here, probe_in
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

HARD_NAMES = {
    "plain.pt": b"plain",
    "empty": b"",
    "a b.txt": b"blank",
    "[a-z]*.bin": b"pattern",
    "größe-日本.bin": "ä".encode(),
    "hash#tag?x=1&y": b"hash",
    "deep/er/than/most/file": b"nested",
}


@attrs.define
class Direct:
    """A transport that counts the calls, and the bytes of the largest one."""

    carrier: Carrier
    calls: list[str] = attrs.field(factory=list)
    largest: int = 0
    fails_at: str | None = None

    def __call__(self, operation: str, *args: Any) -> Any:
        self.calls.append(operation)
        if operation == self.fails_at:
            raise PermissionError(13, "the disk refuses")
        answer = self.carrier.carry(operation, *args)
        self.largest = max([self.largest, *(len(part) for part in (*args, answer) if isinstance(part, bytes))])
        return answer


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "driver" / "run [1]*"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def transport(run_folder: Path) -> Direct:
    return Direct(Carrier(writable=[str(run_folder)]))


@pytest.fixture
def filesystem(transport: Direct) -> CarryFileSystem:
    return CarryFileSystem(transport)


@pytest.fixture
def store(run_folder: Path, filesystem: CarryFileSystem) -> RunStore:
    """The run as a worker on another node sees it."""
    return RunStore(StorageRoot(str(run_folder.parent), filesystem=filesystem), run_folder.name)


@pytest.fixture
def store_of_driver(run_folder: Path) -> RunStore:
    return RunStore(StorageRoot.resolve(run_folder.parent), run_folder.name)


def write_folder(folder: Path, files: dict[str, bytes]) -> Checkpoint:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return Checkpoint.from_directory(folder)


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    with checkpoint.as_directory() as folder:
        return {name: Path(folder, name).read_bytes() for name in checkpoint.files()}


def commit(store: RunStore, parts: dict[int, Any]) -> Any:
    return store.commit(parts, report_index=0, attempt=1, world_size=len(parts), metrics={"loss": 0.5}, created_at=0.0)


# The contract of a store, as a worker uses it and more.


def test_a_run_saves_ends_resumes_and_leaves_nothing_else(store: RunStore, store_of_driver: RunStore):
    first, second = Progress(), Progress()
    live(store, first, num_reports=3)
    live(RunStore(store.root, store.name), second, num_reports=2)
    assert (first.resumed_from, first.committed) == (None, [0, 1, 2])
    assert (second.resumed_from, second.committed) == (2, [3, 4])
    assert [row.report_index for row in store_of_driver.read_history()] == [0, 1, 2, 3, 4]
    assert leftovers(store) == []


def test_ranks_on_both_sides_make_one_checkpoint_that_both_read(
    store: RunStore, store_of_driver: RunStore, tmp_path: Path
):
    far = store.upload(write_folder(tmp_path / "far", HARD_NAMES), report_index=0, attempt=1)
    near = store_of_driver.upload(write_folder(tmp_path / "near", {"near": b"n"}), report_index=0, attempt=1)
    committed = commit(store_of_driver, {0: near, 1: far})
    assert [attrs.evolve(c, path="") for c in store.list_checkpoints()] == [attrs.evolve(committed, path="")]
    assert store.newest_valid() is not None
    store_of_driver.open_checkpoint(committed).verify()
    for place in (store, store_of_driver):
        assert read_all(place.open_checkpoint(committed)) == {**HARD_NAMES, "near": b"n"}
    copy = store.open_checkpoint(committed).to_directory(tmp_path / "copy")
    assert Path(copy, "near").read_bytes() == b"n"
    with store.open_checkpoint(committed).open("deep/er/than/most/file") as stream:
        assert (stream.read(2), stream.seek(-2, os.SEEK_END), stream.read()) == (b"ne", 4, b"ed")


def test_a_large_file_goes_in_pieces_both_ways(
    store: RunStore, store_of_driver: RunStore, transport: Direct, tmp_path: Path
):
    data = os.urandom(1 << 20) * 20 + b"end"
    part = store.upload(write_folder(tmp_path / "far", {"w": data}), report_index=0, attempt=1)
    committed = commit(store_of_driver, {0: part})
    assert part.has_digests
    assert read_all(store.open_checkpoint(committed)) == {"w": data}
    with store.open_checkpoint(committed).open("w") as stream:
        assert (stream.seek(10 << 20), stream.read(5)) == (10 << 20, data[10 << 20 : (10 << 20) + 5])
    assert transport.largest == PIECE_BYTES
    assert sum(call == "write_piece" for call in transport.calls) == 3


def test_damage_on_the_drivers_disk_is_seen_from_far(store: RunStore, run_folder: Path, tmp_path: Path):
    part = store.upload(write_folder(tmp_path / "far", {"w": b"1234"}), report_index=0, attempt=1)
    committed = commit(store, {0: part})
    (run_folder / committed.dir_name / "w").write_bytes(b"1235")
    with pytest.raises(CheckpointDamagedError):
        read_all(store.open_checkpoint(committed))
    assert store.newest_valid() is None


def test_metadata_can_be_set_from_far(store: RunStore, store_of_driver: RunStore, tmp_path: Path):
    committed = commit(store, {0: store.upload(write_folder(tmp_path / "f", {"w": b"1"}), report_index=0, attempt=1)})
    store.open_checkpoint(committed).set_metadata({"a": 1})
    assert store_of_driver.open_checkpoint(committed).get_metadata() == {"a": 1}
    store.open_checkpoint(committed).verify()


def test_a_folder_that_user_code_stored_through_the_filesystem_is_adopted(store: RunStore, store_of_driver: RunStore):
    store.filesystem.pipe_file(f"{store.path}/mine/w", b"123456789")
    stored = Checkpoint(f"{store.path}/mine", store.filesystem)
    assert store.holds(stored)
    committed = commit(store_of_driver, {0: store.adopt(stored, report_index=0, attempt=1)})
    store_of_driver.open_checkpoint(committed).verify()
    assert committed.manifest.files[0].crc32 == "cbf43926"


@pytest.mark.parametrize("fails_at", ["write", "write_piece", "rename"])
def test_an_upload_that_fails_leaves_no_file(
    store: RunStore, transport: Direct, run_folder: Path, tmp_path: Path, fails_at: str
):
    checkpoint = write_folder(tmp_path / "far", {"small": b"1", "large": bytes(5 << 20)})
    transport.fails_at = fails_at
    with pytest.raises(UploadError, match="the disk refuses"):
        store.upload(checkpoint, report_index=0, attempt=1)
    assert [path for path in run_folder.rglob("*") if path.is_file()] == []


def test_the_run_folder_is_no_staging_place_from_far(store: RunStore):
    """Staging renames, which needs one disk."""
    assert not store.is_local
    folder = store.staging_directory(1)
    assert not folder.startswith(store.path)
    os.rmdir(folder)


# The filesystem itself.


def test_the_operations_of_fsspec(filesystem: CarryFileSystem, run_folder: Path):
    base = str(run_folder)
    filesystem.makedirs(base, exist_ok=True)
    filesystem.makedirs(f"{base}/a/b", exist_ok=True)
    filesystem.pipe_file(f"{base}/a/b/f", b"0123456789")
    assert filesystem.info(f"{base}/a/b/f") == {"name": f"{base}/a/b/f", "size": 10, "type": "file"}
    assert filesystem.info(f"{base}/a/")["type"] == "directory"
    assert filesystem.ls(f"{base}/a", detail=False) == [f"{base}/a/b"]
    assert filesystem.ls(f"{base}/a/b/f", detail=False) == [f"{base}/a/b/f"]
    assert filesystem.find(base) == [f"{base}/a/b/f"]
    assert filesystem.cat_file(f"{base}/a/b/f", start=2, end=4) == b"23"
    assert filesystem.cat_file(f"{base}/a/b/f", start=-3) == b"789"
    assert filesystem.cat_file(f"{base}/a/b/f", end=-8) == b"01"
    assert filesystem.cat_file(f"{base}/a/b/f", start=20, end=30) == b""
    with pytest.raises(FileExistsError):
        filesystem.pipe_file(f"{base}/a/b/f", b"x", mode="create")
    filesystem.mv(f"{base}/a/b/f", f"{base}/a/g")
    assert not filesystem.exists(f"{base}/a/b/f")
    filesystem.put_file(str(run_folder / "a" / "g"), f"{base}/new/h")
    filesystem.get_file(f"{base}/new/h", str(run_folder.parent / "got"))
    assert (run_folder.parent / "got").read_bytes() == b"0123456789"
    with filesystem.open(f"{base}/e", "wb"):
        pass
    assert (run_folder / "e").read_bytes() == b""
    with filesystem.open(f"{base}/text", "w") as file:
        file.write("ä")
    with filesystem.open(f"{base}/text", "r") as file:
        assert file.read() == "ä"
    filesystem.rm(f"{base}/a", recursive=True)
    assert sorted(path.name for path in run_folder.iterdir()) == ["e", "new", "text"]
    for missing in (filesystem.info, filesystem.cat_file, filesystem.ls, filesystem.rm_file, filesystem.open):
        with pytest.raises(FileNotFoundError):
            missing(f"{base}/none")
    with pytest.raises(ValueError, match="mode"):
        filesystem.open(f"{base}/e", "ab")


def test_an_exception_while_writing_leaves_nothing(filesystem: CarryFileSystem, run_folder: Path):
    def write_half() -> None:
        with filesystem.open(f"{run_folder}/f", "wb") as file:
            file.write(bytes(PIECE_BYTES + 1))
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert list(run_folder.iterdir()) == []


def test_it_travels_as_a_small_object(tmp_path: Path):
    filesystem = CarryFileSystem(json.dumps)
    data = pickle.dumps(Checkpoint("/driver/run/checkpoint_000000", filesystem))
    assert len(data) < 1_000
    assert pickle.loads(data) == Checkpoint("/driver/run/checkpoint_000000", filesystem)


# What a worker may not do.


def escapes(folder: Path) -> list[str]:
    return [
        f"{folder}/../outside",
        f"{folder.parent}/outside",
        f"{folder}x",
        f"{folder}/link/secret",
        f"{folder}/a/../../outside",
        "outside",
        "/",
        "",
    ]


def test_nothing_outside_of_the_run_is_touched(transport: Direct, run_folder: Path):
    secret = run_folder.parent / "outside"
    secret.write_text("secret")
    (run_folder.parent / "folder").mkdir()
    (run_folder.parent / "folder" / "secret").write_text("secret")
    (run_folder / "link").symlink_to(run_folder.parent / "folder")
    (run_folder / "to_file").symlink_to(secret)
    (run_folder / ".tmp-0123456789abcdef").symlink_to(secret)
    (run_folder / "mine").write_text("mine")
    before = sorted(path.as_posix() for path in run_folder.parent.rglob("*"))
    for path in [*escapes(run_folder), f"{run_folder}/to_file"]:
        for operation, args in [("look", ()), ("list", ()), ("read", (0, 10))]:
            with pytest.raises(PermissionError):
                transport(operation, path, *args)
    for path in [*escapes(run_folder), str(run_folder), f"{run_folder}/", f"{run_folder}/x/.."]:
        for operation, args in [
            ("write", (b"x",)),
            ("create", (b"x",)),
            ("write_piece", (0, b"x")),
            ("rename", (f"{run_folder}/new",)),
            ("remove", ()),
            ("make_folder", (False,)),
            ("remove_folder", ()),
        ]:
            with pytest.raises(PermissionError):
                transport(operation, path, *args)
        with pytest.raises(PermissionError):
            transport("rename", f"{run_folder}/mine", path)
    with pytest.raises(OSError, match="symbolic link"):
        transport("write_piece", f"{run_folder}/.tmp-0123456789abcdef", 0, b"x")
    with pytest.raises(ValueError, match="unfinished"):
        transport("write_piece", f"{run_folder}/mine", 0, b"x")
    with pytest.raises(ValueError, match="at most"):
        transport("read", f"{run_folder}/mine", 0, PIECE_BYTES + 1)
    with pytest.raises(ValueError, match="no operation"):
        transport("serve", f"{run_folder}/mine")
    assert sorted(path.as_posix() for path in run_folder.parent.rglob("*")) == before
    assert secret.read_text() == "secret"


def test_a_link_in_the_run_is_removed_itself(transport: Direct, run_folder: Path):
    (run_folder.parent / "outside").write_text("o")
    (run_folder / "link").symlink_to(run_folder.parent / "outside")
    transport("remove", f"{run_folder}/link")
    assert (run_folder.parent / "outside").read_text() == "o"


def test_the_checkpoint_to_start_from_can_be_read_and_no_more(tmp_path: Path):
    write_folder(tmp_path / "start", {"w": b"1"})
    filesystem = CarryFileSystem(Direct(Carrier(readable=[str(tmp_path / "start")])))
    assert read_all(Checkpoint(tmp_path / "start", filesystem)) == {"w": b"1"}
    for operation in (filesystem.rm_file, lambda path: filesystem.pipe_file(path, b"2")):
        with pytest.raises(PermissionError):
            operation(f"{tmp_path}/start/w")


def test_an_error_is_served_as_a_value_and_a_reference_is_fetched_at_its_turn(run_folder: Path):
    async def serve_all() -> tuple[Any, Any, Any]:
        carrier = Carrier(writable=[str(run_folder)])
        coming: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        writing = asyncio.ensure_future(carrier.serve("write", [f"{run_folder}/f", [coming]]))
        missing = await carrier.serve("read", [f"{run_folder}/f", 0, 10])
        coming.set_result(b"data")
        return missing, await writing, await carrier.serve("read", [f"{run_folder}/f", 0, 10])

    missing, written, found = asyncio.run(serve_all())
    assert isinstance(missing, FileNotFoundError)
    assert (written, found) == (None, b"data")


# Whether a node needs it.


def test_a_probe_is_found_only_with_its_own_content(tmp_path: Path):
    with probe_in(StorageRoot.resolve(tmp_path)) as probe:
        assert probe is not None
        assert pickle.loads(pickle.dumps(probe)).is_found()
        assert not attrs.evolve(probe, content=b"other").is_found()
        assert not Probe(f"{probe.path}x", probe.content).is_found()
        assert not Probe(str(tmp_path), probe.content).is_found()
        assert probe.content.hex() not in repr(probe)
    assert list(tmp_path.iterdir()) == []


def test_no_probe_where_storage_is_no_disk():
    with probe_in(StorageRoot.resolve("s3://bucket/run")) as probe:
        assert probe is None


def test_a_node_with_the_disk_uses_it_and_others_do_not(tmp_path: Path):
    root, remote = StorageRoot.resolve(tmp_path), StorageRoot.resolve("s3://bucket")
    checkpoint = write_folder(tmp_path / "c", {"w": b"1"})
    elsewhere = Checkpoint(tmp_path / "not here")
    in_cloud = Checkpoint("s3://bucket/c")
    lost = Probe(str(tmp_path / "not here"), b"1")
    with probe_in(root) as probe:
        assert as_seen_here(root, checkpoint, probe, None) == (root, checkpoint, False)
    assert as_seen_here(remote, in_cloud, None, None) == (remote, in_cloud, False)
    assert as_seen_here(remote, None, None, None) == (remote, None, False)
    far_root, far_checkpoint, is_carried = as_seen_here(root, checkpoint, lost, None)
    assert is_carried
    assert isinstance(far_root.filesystem, CarryFileSystem)
    assert far_checkpoint is not None
    assert isinstance(far_checkpoint.filesystem, CarryFileSystem)
    assert as_seen_here(root, in_cloud, lost, None)[1] is in_cloud
    # The run is in the cloud, and the user starts it from a folder of the driver's machine.
    _, started_from, is_carried = as_seen_here(remote, elsewhere, None, None)
    assert (is_carried, type(started_from.filesystem)) == (False, CarryFileSystem)


def test_a_checkpoint_that_is_on_neither_disk_is_not_found(filesystem: CarryFileSystem, run_folder: Path):
    with pytest.raises(CheckpointNotFoundError):
        read_all(Checkpoint(f"{run_folder}/none", filesystem))
