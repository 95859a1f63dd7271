"""What a run's store promises, on every kind of storage: local disks, memory, and real servers on loopback."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from places import KINDS, Place, no_retries, place_on
from servers import Server
from storage_lives import Progress, check_content, dead_holder, leftovers, live

from ray_lite.train.errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConfigError,
    RunInUseError,
    StorageError,
)
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.manifest import MANIFEST_NAME
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.run_record import RunRecord
from ray_lite.train.storage.store import CommittedCheckpoint, RunStore

HARD_NAMES = {
    "plain.pt": b"plain",
    "empty": b"",
    "a b.txt": b"blank",
    "100%41.txt": b"percent",
    "[a-z]*.bin": b"pattern",
    "größe-日本.bin": "ä".encode(),
    "hash#tag": b"hash",
    "query?x=1&y": b"query",
    "a+b=c@d,e$f!": b"others",
    "others;": b"semicolon",
    "deep/er/than/most/file": b"nested",
    "deep/er/empty": b"",
}


def write_folder(folder: Path, files: dict[str, bytes]) -> Checkpoint:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return Checkpoint.from_directory(folder)


def save(
    store: RunStore, folder: Path, report_index: int, files: dict[str, bytes] | None = None, *, attempt: int = 1
) -> CommittedCheckpoint:
    """One report of one worker with a checkpoint."""
    source = folder / f"source-{report_index}-{attempt}"
    checkpoint = write_folder(source, files or {"w": b"w%d" % report_index, "sub/v": b"v%d" % report_index})
    part = store.upload(checkpoint, report_index=report_index, attempt=attempt)
    return store.commit(
        {0: part},
        report_index=report_index,
        attempt=attempt,
        world_size=1,
        metrics={"loss": report_index},
        created_at=float(report_index),
    )


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    with checkpoint.as_directory() as folder:
        names = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in names}


# A run and its checkpoints.


@pytest.mark.parametrize("place", [*KINDS, "s3_filesystem"], indirect=True)
def test_a_run_saves_ends_resumes_and_leaves_nothing_else(place: Place):
    first, second = Progress(), Progress()
    live(place.store("run 1"), first, num_reports=3)
    live(place.store("run 1"), second, num_reports=2)
    store = place.store("run 1")
    assert (first.resumed_from, first.committed) == (None, [0, 1, 2])
    assert (second.resumed_from, second.committed) == (2, [3, 4])
    assert [committed.report_index for committed in store.list_checkpoints()] == [4]
    assert [row.report_index for row in store.read_history()] == [0, 1, 2, 3, 4]
    record = store.read_record()
    assert record is not None
    assert record.state == "finished"
    assert leftovers(store) == []


def test_a_checkpoint_exists_only_from_its_commit_on(place: Place, tmp_path: Path):
    store = place.store()
    part = store.upload(write_folder(tmp_path / "s", {"w": b"w"}), report_index=0, attempt=1)
    assert place.store().list_checkpoints() == []
    assert place.store().newest_valid() is None
    committed = store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    assert place.store().list_checkpoints() == [committed]
    assert place.store().newest_valid() == committed
    with pytest.raises(CheckpointConflictError):
        store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)


def test_names_of_all_kinds_and_empty_files_come_back_as_they_were(place: Place, tmp_path: Path):
    """And they are stored under that very name: the keys are what other tools see."""
    store = place.store("run 1 [é]%41")
    names = dict(HARD_NAMES)
    if place.kind == "gs":
        # The emulator cuts a path off at ";", which the service does not.
        del names["others;"]
    committed = save(store, tmp_path, 0, names)
    assert [file.path for file in committed.manifest.files] == sorted(names)
    folder = f"run 1 [é]%41/{committed.dir_name}"
    assert place.stored() == sorted(f"{folder}/{name}" for name in [*names, MANIFEST_NAME])
    checkpoint = place.store("run 1 [é]%41").open_checkpoint(committed)
    checkpoint.verify()
    assert read_all(checkpoint) == names
    assert checkpoint.files() == sorted(names)
    for name, data in names.items():
        with checkpoint.open(name) as file:
            assert file.read() == data
    assert store.delete(committed)
    assert place.stored() == []


@pytest.mark.parametrize("name", ["run #1", "what?", "a::b", "blank "])
def test_a_name_comes_back_as_it_was_or_is_refused_before_anything_is_written(place: Place, tmp_path: Path, name: str):
    """In a URI, what follows "?" or "#" may not be part of the path any more."""
    if "://" in place.root.path:
        with pytest.raises(ConfigError, match=r"run name must not hold '\?', '#' or '::'"):
            place.store(name)
        with pytest.raises(ConfigError, match="checkpoint_dir_name must not hold"):
            place.store().checkpoint_dir_name(0, 1, name)
        return
    committed = save(place.store(name), tmp_path, 0)
    assert place.store(name).newest_valid() == committed
    assert read_all(place.store(name).open_checkpoint(committed)) == {"w": b"w0", "sub/v": b"v0"}


def test_every_way_of_reading_gives_what_was_saved(place: Place, tmp_path: Path):
    store = place.store()
    live(store, Progress(), num_reports=1)
    checkpoint = pickle.loads(pickle.dumps(store.open_checkpoint(store.newest_valid())))
    checkpoint.verify()
    check_content(checkpoint, 0)
    check_content(Checkpoint(checkpoint.to_directory(tmp_path / "copy")), 0)
    with checkpoint.open("common") as file:
        assert file.read() == b"the same on all ranks"
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        checkpoint.open("nothing")
    checkpoint.set_metadata({"note": "é"})
    assert checkpoint.get_metadata() == {"note": "é"}
    checkpoint.verify()
    again = pickle.loads(pickle.dumps(store))
    assert again.newest_valid() == store.newest_valid()


def test_many_small_files_arrive(place: Place, tmp_path: Path):
    files = {f"{number % 7}/{number:03d}": b"%d" % number for number in range(100)}
    store = place.store()
    committed = save(store, tmp_path, 0, files)
    assert len(committed.manifest.files) == 100
    assert read_all(store.open_checkpoint(committed)) == files


def test_a_large_file_goes_up_and_comes_back_whole(place: Place, tmp_path: Path):
    store = place.store()
    data = os.urandom(17 << 20)
    committed = save(store, tmp_path, 0, {"big [x]*": data, "small": b"s"})
    assert store.newest_valid() == committed
    with store.open_checkpoint(committed).as_directory() as folder:
        assert Path(folder, "big [x]*").read_bytes() == data
    assert store.delete(committed)
    assert place.stored() == []


@pytest.mark.parametrize("kind", ["s3", "azure"])
def test_a_very_large_file_is_sent_in_parts(kind: str, request: pytest.FixtureRequest, tmp_path: Path):
    """The drivers send up to 100 MB in one piece; beyond that, several parts go up at the same time."""
    place = place_on(request.getfixturevalue(f"{kind}_server"))
    (tmp_path / "source").mkdir()
    block = os.urandom(1 << 20)
    with open(tmp_path / "source" / "big", "wb") as file:
        for _ in range(101):
            file.write(block)
    store = place.store()
    part = store.upload(Checkpoint(tmp_path / "source"), report_index=0, attempt=1)
    committed = store.commit({0: part}, report_index=0, attempt=1, world_size=1, metrics={}, created_at=0.0)
    assert store.newest_valid() == committed
    if kind == "s3":
        assert place.raw.num_parts(place.key("run", committed.dir_name, "big")) == 3
        assert place.raw.open_uploads() == []


# Only its own.


def test_a_pattern_in_a_name_touches_nothing_that_it_matches(place: Place, tmp_path: Path):
    """``a[1]`` as a pattern is ``a1``, and ``run*`` is everybody's run."""
    others = {f"{name}/checkpoint_000000/w": b"theirs" for name in ("run1", "run2", "run[1]x")}
    for key, data in others.items():
        place.raw.write(place.key(*key.split("/")), data)
    for name in ("run[1]", "run*", "run[!x]"):
        store = place.store(name)
        committed = save(store, tmp_path / name, 0, {"a1": b"1", "a[1]": b"2", "a*": b"3"})
        assert read_all(store.open_checkpoint(committed)) == {"a1": b"1", "a[1]": b"2", "a*": b"3"}
        assert [found.path for found in store.list_checkpoints()] == [committed.path]
        assert store.delete(committed)
        assert store.list_checkpoints() == []
        store.upload(write_folder(tmp_path / name / "lost", {"w": b"w"}), report_index=1, attempt=1)
        assert store.remove_orphans(before_attempt=2) == ["checkpoint_000001"]
    assert place.stored() == sorted(others)


def test_what_the_run_did_not_make_is_never_removed(place: Place, tmp_path: Path):
    store = place.store()
    theirs = ["run/my notes/a.txt", "run/readme.md", "run/checkpoints/w", "run10/checkpoint_000000/w"]
    for name in theirs:
        place.raw.write(place.key(*name.split("/")), b"theirs")
    committed = save(store, tmp_path, 0)
    store.remove_orphans(before_attempt=9)
    assert place.store().list_checkpoints() == [committed]
    assert store.delete(committed)
    assert place.stored() == sorted(theirs)


def test_orphans_of_earlier_attempts_go_and_those_of_this_one_stay(place: Place, tmp_path: Path):
    store = place.store()
    kept = save(store, tmp_path, 0)
    for attempt in (1, 2):
        store.upload(write_folder(tmp_path / f"lost-{attempt}", {"a/b/w": b"w"}), report_index=1, attempt=attempt)
    place.raw.write(place.key("run", ".tmp-0123456789abcdef"), b"half")
    removed = store.remove_orphans(before_attempt=2)
    assert sorted(removed) == [".tmp-0123456789abcdef", "checkpoint_000001"]
    assert place.stored("run", "checkpoint_000001") == ["run/checkpoint_000001_attempt_2/a/b/w"]
    assert store.remove_orphans(before_attempt=3) == ["checkpoint_000001_attempt_2"]
    assert store.list_checkpoints() == [kept]
    assert leftovers(store) == []


# Record, history, lock.


def test_a_record_is_replaced_whole_and_rebuilt_when_damaged(place: Place, tmp_path: Path, caplog):
    store = place.store()
    assert store.read_record() is None
    for state in ("running", "finished"):
        store.write_record(
            RunRecord(
                name="run",
                attempt=3,
                state=state,
                started_at=1.0,
                updated_at=2.0,
                world_size=2,
                next_report_index=5,
                metrics={"loss": float("inf")},
            )
        )
    record = place.store().read_record()
    assert record is not None
    assert (record.state, record.attempt, record.metrics) == ("finished", 3, {"loss": float("inf")})
    assert place.stored() == ["run/run.json"]
    save(store, tmp_path, 4, attempt=3)
    data = place.raw.read(place.key("run", "run.json"))
    place.raw.write(place.key("run", "run.json"), data[: len(data) // 2])
    with caplog.at_level(logging.WARNING):
        assert place.store().read_record() is None
    assert "rebuilt" in caplog.text
    rebuilt = place.store().rebuild_record()
    assert rebuilt is not None
    assert (rebuilt.attempt, rebuilt.next_report_index, rebuilt.state) == (3, 5, "interrupted")


def test_history_is_kept_in_order_and_a_restart_replaces_what_it_repeats(place: Place):
    store = place.store()
    for attempt, indices in ((1, range(6)), (2, range(4, 8)), (10, range(7, 9))):
        writer = store.history_writer(attempt)
        for index in indices:
            writer.append([json.dumps({"i": index, "t": 0.5, "m": {"attempt": attempt}}).encode()])
            if index % 2:
                writer.flush()
        writer.close()
    rows = place.store().read_history()
    assert [row.report_index for row in rows] == list(range(9))
    assert [row.metrics["attempt"] for row in rows] == [1, 1, 1, 1, 2, 2, 2, 10, 10]
    assert store.last_attempt() == 10


def test_the_second_live_run_is_refused_and_a_dead_one_is_not_waited_for(place: Place):
    first = place.store()
    holder = first.acquire()
    with pytest.raises(RunInUseError, match=f"in use by process {holder.pid} of "):
        place.store().acquire()
    first.release()
    place.store().acquire(holder=dead_holder())
    second = place.store()
    second.acquire()
    with pytest.raises(RunInUseError):
        place.store().acquire()
    second.release()
    assert place.stored() == []


# Damage behind our back.


def flip(place: Place, folder: str) -> str:
    data = bytearray(place.raw.read(place.key(folder, "sub", "v")))
    data[1] ^= 4
    place.raw.write(place.key(folder, "sub", "v"), bytes(data))
    return "'sub/v' has other content"


def truncate(place: Place, folder: str) -> str:
    place.raw.write(place.key(folder, "w"), b"w")
    return "'w' has 1 bytes instead of 2"


def lose(place: Place, folder: str) -> str:
    place.raw.remove(place.key(folder, "w"))
    return "'w' is missing"


def swap(place: Place, folder: str) -> str:
    w, v = (place.key(folder, name) for name in ("w", "sub/v"))
    contents = place.raw.read(w), place.raw.read(v)
    place.raw.write(v, contents[0])
    place.raw.write(w, contents[1])
    return "other content"


def add(place: Place, folder: str) -> str:
    place.raw.write(place.key(folder, "sub", "more"), b"m")
    return "'sub/more' was not committed with it"


def cut_manifest(place: Place, folder: str) -> str:
    data = place.raw.read(place.key(folder, MANIFEST_NAME))
    place.raw.write(place.key(folder, MANIFEST_NAME), data[:-20])
    return "manifest"


@pytest.mark.parametrize("damage", [flip, truncate, lose, swap, add, cut_manifest])
def test_damage_is_found_and_the_older_checkpoint_is_taken(place: Place, tmp_path: Path, caplog, damage):
    store = place.store()
    older, newer = save(store, tmp_path, 0), save(store, tmp_path, 1)
    assert store.newest_valid() == newer
    what = damage(place, f"run/{newer.dir_name}")
    with caplog.at_level(logging.WARNING):
        assert store.newest_valid() == older
        assert place.store().newest_valid() == older
    assert newer.path in caplog.text
    assert what in caplog.text
    checkpoint = store.open_checkpoint(newer)
    with pytest.raises(CheckpointDamagedError, match=r"damaged|manifest"):
        checkpoint.verify()
    if damage is not add and not (store.is_local and damage in (flip, swap)):
        with pytest.raises(CheckpointDamagedError), checkpoint.as_directory():
            pass
    assert read_all(store.open_checkpoint(older)) == {"w": b"w0", "sub/v": b"v0"}


@pytest.mark.parametrize("place", [*KINDS, "s3_filesystem"], indirect=True)
def test_what_others_write_and_remove_is_seen_at_once(place: Place, tmp_path: Path):
    """Listings are never taken from a cache, whatever the filesystem that the user passed does by default."""
    store = place.store()
    first = save(store, tmp_path, 0)
    assert store.list_checkpoints() == [first]
    place.raw.remove(place.key("run", first.dir_name, "w"))
    with pytest.raises(CheckpointDamagedError, match="'w' is missing"):
        store.open_checkpoint(first).verify(digests=False)
    place.raw.remove(place.key("run", first.dir_name, MANIFEST_NAME))
    assert store.list_checkpoints() == []
    second = save(place.store(), tmp_path, 1)
    copied = {name: place.raw.read(place.key(name)) for name in place.stored("run", second.dir_name)}
    assert store.list_checkpoints() == [second]
    for name in copied:
        place.raw.remove(place.key(name))
    assert store.list_checkpoints() == []
    for name, data in copied.items():
        place.raw.write(place.key(name), data)
    assert store.newest_valid() == second


# Secrets.


@pytest.mark.parametrize("place", ["s3", "s3_filesystem", "azure", "sftp", "sshfs"], indirect=True)
def test_secrets_reach_neither_files_nor_texts(place: Place, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="ray_lite"):
        store = place.store()
        live(store, Progress(), num_reports=2, num_to_keep=2)
        store.acquire()
        newest = store.list_checkpoints()[-1]
        lose_name = place.stored("run", newest.dir_name)[-1]
        place.raw.remove(place.key(lose_name))
        assert store.newest_valid() != newest
    checkpoint = store.open_checkpoint(newest)
    texts = [caplog.text, repr(place.root), repr(store), repr(checkpoint), repr(newest), str(checkpoint)]
    stored = {name: place.raw.read(place.key(name)) for name in place.stored()}
    assert {"run/run.json", "run/.lock.json"} <= set(stored)
    for secret in place.secrets:
        assert not [text for text in texts if secret in text]
        assert not [name for name, data in stored.items() if secret.encode() in data]
    store.release()


# Places that cannot be used: one clear message, within two seconds, before any worker starts.


def refused(place_root, *, within_s: float = 2.0) -> str:
    with no_retries() as policy:
        store = RunStore(place_root, "run", retry=policy())
        start = time.perf_counter()
        with pytest.raises(StorageError) as raised:
            store.check_writable()
        assert time.perf_counter() - start < within_s
    return str(raised.value)


def test_a_place_that_is_there_can_be_written(place: Place):
    with no_retries() as policy:
        place.store(retry=policy()).check_writable()
    assert place.stored() == []


@pytest.mark.parametrize("kind", ["s3", "azure", "google"])
def test_a_missing_bucket_is_named_at_once_and_not_created(kind: str, request: pytest.FixtureRequest):
    server: Server = request.getfixturevalue(f"{kind}_server")
    for _ in range(2):
        message = refused(StorageRoot.resolve(server.missing, server.options))
        assert f"storage_path '{server.missing}' cannot be written: " in message
        assert "check that the bucket or folder exists" in message


@pytest.mark.parametrize("kind", ["s3", "azure", "sftp", "sshfs"])
def test_wrong_credentials_are_told_at_once(kind: str, request: pytest.FixtureRequest):
    server: Server = request.getfixturevalue(f"{kind}_server")
    path = f"{server.base}/denied"
    with server.refuse_strangers():
        message = refused(StorageRoot.resolve(path, server.wrong_options))
    assert f"storage_path '{path}" in message
    assert "credentials" in message
    assert not [secret for secret in server.secrets if secret in message]
    assert server.raw.keys("denied") == []


def test_a_path_below_a_file_is_refused_at_once(sftp_server: Server):
    place = place_on(sftp_server, "x")
    place.raw.write(place.base, b"a file")
    assert place.root.path in refused(place.root)
    assert place.raw.read(place.base) == b"a file"


_WITHOUT_DRIVERS = """
import sys, time

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("s3fs", "gcsfs", "adlfs", "paramiko", "sshfs"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from ray_lite.train.errors import StorageError
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

for protocol in ("s3", "gs", "abfs", "sftp"):
    start = time.perf_counter()
    try:
        RunStore(StorageRoot.resolve(f"{protocol}://somewhere/x"), "run").check_writable()
    except StorageError as error:
        print(time.perf_counter() - start, error)
"""


def test_a_driver_that_is_not_installed_is_named_within_a_second():
    """On the driver process, before any worker starts."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT_DRIVERS], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    names = [("s3", "s3"), ("gs", "gcs"), ("abfs", "azure"), ("sftp", "sftp")]
    for line, (protocol, extra) in zip(lines, names, strict=True):
        seconds, _, message = line.partition(" ")
        assert float(seconds) < 1.0
        expected = f"the driver for {protocol}:// is not installed here; pip install 'ray-lite-train[{extra}]'"
        assert message == f"storage_path '{protocol}://somewhere/x/run': {expected}"


def test_a_protocol_that_nobody_knows_is_refused_with_those_that_are_known():
    assert "no filesystem is registered for nonsense://; known are " in refused(StorageRoot.resolve("nonsense://a/b"))


# Drivers.


def test_options_in_a_uri_are_refused_with_their_translation(s3_server: Server, tmp_path: Path):
    """Others write them into the path, where fsspec would make them a part of every key."""
    endpoint = s3_server.options["endpoint_url"]
    uri = f"s3://bucket/translated?endpoint_override={endpoint}&region=us-east-1"
    with pytest.raises(ConfigError) as raised:
        StorageRoot.resolve(uri)
    assert "endpoint_override -> endpoint_url, region -> client_kwargs={'region_name': ...}" in str(raised.value)
    root = StorageRoot.resolve("s3://bucket/translated", s3_server.options)
    save(RunStore(root, "n"), tmp_path, 0)
    folder = "translated/n/checkpoint_000000"
    assert s3_server.raw.keys("translated") == [f"{folder}/{name}" for name in (MANIFEST_NAME, "sub/v", "w")]


def test_a_lost_ssh_connection_is_made_again(sftp_server: Server, tmp_path: Path):
    """fsspec's driver keeps one connection for all, and would fail for ever once it is gone."""
    place = place_on(sftp_server)
    store = place.store()
    save(store, tmp_path, 0)
    store.filesystem.client.get_transport().sock.close()
    committed = save(store, tmp_path, 1)
    assert store.newest_valid() == committed


def test_many_threads_share_one_ssh_connection(sftp_server: Server, tmp_path: Path):
    """paramiko loses answers when two threads wait for one, and both wait for ever."""
    place = place_on(sftp_server)
    store = place.store()
    committed = save(store, tmp_path, 0, {"w": os.urandom(3 << 20)})

    def use(number: int) -> None:
        mine = place.store(f"run-{number}")
        save(mine, tmp_path / str(number), 0, {str(name): b"x" * 40_000 for name in range(5)})
        with store.open_checkpoint(committed).open("w") as file:
            assert len(file.read()) == 3 << 20

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(6)))


@pytest.mark.parametrize("place", ["local", "filesystem", "sftp", "sshfs"], indirect=True)
def test_where_there_are_folders_files_are_replaced_by_rename(place: Place):
    """A reader, and a kill, sees the old bytes or the new ones. Writing over the file in place would show a part."""
    store = place.store()
    files, folder = store._open()
    contents = []
    for data in (b"old", b"new"):
        files.write(f"{folder}/run.json", data)
        path = place.raw.path(place.key("run", "run.json"))
        contents.append(open(path, "rb"))  # noqa: SIM115  # stays open over the next write
    with contents[0] as old, contents[1] as new:
        assert (old.read(), new.read()) == (b"old", b"new")
    assert place.stored() == ["run/run.json"]
