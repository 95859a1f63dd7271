"""What was reported is stored, or kept elsewhere, or the user is told: full disks, folders that somebody removes."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import attrs
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from ray_lite import train
from ray_lite.train.configs import CheckpointConfig
from ray_lite.train.context.journal import DIR_VARIABLE
from ray_lite.train.context.records import Part, encode_report
from ray_lite.train.errors import CheckpointConflictError, StorageError
from ray_lite.train.execution import ledger as ledger_module
from ray_lite.train.execution.ledger import Ledger
from ray_lite.train.execution.messages import CheckpointCommitted, Notice
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.files import Files
from ray_lite.train.storage.history import FileHistoryWriter, SegmentHistoryWriter, read_rows, rescue
from ray_lite.train.storage.remote import RemoteFiles
from ray_lite.train.storage.retry import RetryPolicy
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem

REAL_WRITE = os.write


@pytest.fixture(autouse=True)
def _empty_memory():
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


class Disk:
    """Takes so many bytes, then none."""

    def __init__(self, monkeypatch) -> None:
        self.space = 1 << 60
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, fd, data):
        if data and not self.space:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_taken = REAL_WRITE(fd, data[: self.space])
        self.space -= num_taken
        return num_taken


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def line(index, **metrics) -> bytes:
    return json.dumps({"i": index, "t": index + 0.5, "m": metrics}).encode()


def indices(folder: Path) -> list[int]:
    paths = sorted(folder.glob("*.jsonl"))
    return [row.report_index for row in read_rows([(1, path.read_bytes()) for path in paths])]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run" / "metrics"


@pytest.fixture
def writer(folder) -> FileHistoryWriter:
    return FileHistoryWriter(str(folder / "attempt_000001.jsonl"), look_interval_s=0.0)


def put_back(left, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / left.file_name).write_bytes(left.lines)


# -- a disk that refuses -----------------------------------------------------------------------


def test_lines_that_a_full_disk_refused_are_handed_back_and_can_be_put_back(writer, folder, disk, caplog):
    disk.space = len(line(0)) + 1 + 7
    for index in range(5):
        writer.append([line(index)])
    left = writer.close()
    assert (left.num_lines, left.first_report_index, left.lost) == (4, 1, "")
    assert "No space left" in left.reason
    # No half line is left behind, which would be called damaged at every look at the run.
    assert (folder / "attempt_000001.jsonl").read_bytes() == line(0) + b"\n"
    put_back(left, folder)
    assert indices(folder) == [0, 1, 2, 3, 4]
    assert writer.close() is None


def test_half_a_line_of_a_killed_process_spoils_nothing_on_a_full_disk(writer, folder, disk):
    folder.mkdir(parents=True)
    (folder / "attempt_000001.jsonl").write_bytes(line(0) + b"\n" + line(1)[:9])
    disk.space = 0
    writer.append([line(2)])
    disk.space = 1 << 60
    writer.append([line(3)])
    assert writer.close() is None
    assert indices(folder) == [0, 2, 3]


def test_lines_beyond_the_memory_are_counted_whether_or_not_the_disk_recovers(folder, disk, caplog):
    writer = FileHistoryWriter(str(folder / "attempt_000001.jsonl"), max_waiting_bytes=200)
    disk.space = 0
    for index in range(20):
        writer.append([line(index)])
    disk.space = 1 << 60
    writer.append([line(20)])
    left = writer.close()
    num_dropped = 21 - len(indices(folder))
    assert num_dropped > 0
    assert left.lost == f"{num_dropped} lines came while 200 bytes waited already, and were dropped"
    assert left.lines == b""
    assert caplog.text.count("memory for lines that wait is full") == 1


def test_space_that_is_refused_at_close_is_no_success(writer, folder, monkeypatch):
    """NFS takes writes into memory, and answers "disk quota exceeded" when the file is closed."""
    writer.append([line(0), line(1)])
    real_close = os.close

    def close(fd):
        os.truncate(folder / "attempt_000001.jsonl", len(line(0)) + 1)
        real_close(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    writer.flush()
    monkeypatch.setattr(os, "close", close)
    left = writer.close()
    assert left.lost == "1 lines that were stored have been removed from outside"
    assert "quota" in left.reason


# -- somebody at work in the folder --------------------------------------------------------------


def test_a_removed_folder_is_made_again_with_all_it_held(writer, folder, caplog):
    for index in range(3):
        writer.append([line(index)])
    shutil.rmtree(folder.parent)
    writer.append([line(3)])
    assert writer.close() is None
    assert indices(folder) == [0, 1, 2, 3]
    assert caplog.text.count("was removed, replaced or cut while the run goes on; nothing is lost") == 1


def test_a_folder_removed_after_the_last_line_is_noticed_at_the_end(writer, folder):
    writer.append([line(0)])
    shutil.rmtree(folder.parent)
    assert writer.close() is None
    assert indices(folder) == [0]


def test_a_folder_that_was_moved_away_goes_on_under_its_name(writer, folder):
    writer.append([line(0)])
    folder.parent.rename(folder.parent.with_name("archive"))
    writer.append([line(1)])
    assert writer.close() is None
    assert indices(folder) == [0, 1]


def test_a_removed_file_waits_in_memory_while_the_disk_is_full(writer, folder, disk):
    disk.space = len(line(0)) + 1 + 9
    writer.append([line(0)])
    writer.append([line(1)])
    shutil.rmtree(folder.parent)
    writer.append([line(2)])
    left = writer.close()
    assert (left.num_lines, left.lost) == (3, "")
    put_back(left, folder)
    assert indices(folder) == [0, 1, 2]


def test_what_a_removed_file_no_longer_gives_back_is_counted(writer, folder, monkeypatch, caplog):
    writer.append([line(0), line(1)])
    shutil.rmtree(folder.parent)

    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", stale)
        # One try finds the file gone, and cannot look at the new one either.
        writer.append([line(2)])
    writer.append([line(3)])
    left = writer.close()
    assert left.lost == "2 lines that were stored have been removed from outside"
    assert left.lines == b""
    assert indices(folder) == [2, 3]


def test_lines_that_a_replaced_file_lacks_are_counted(writer, folder, caplog):
    path = folder / "attempt_000001.jsonl"
    writer.append([line(index) for index in range(5)])
    copy = path.read_bytes()[: 2 * (len(line(0)) + 1)]
    path.unlink()
    path.write_bytes(copy)
    writer.append([line(5)])
    left = writer.close()
    assert left.lost == "3 lines that were stored have been removed from outside"
    assert indices(folder) == [0, 1, 5]
    assert "3 lines that it held are lost" in caplog.text


def test_a_file_that_was_put_back_whole_has_lost_nothing(writer, folder):
    path = folder / "attempt_000001.jsonl"
    writer.append([line(0), line(1)])
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)
    writer.append([line(2)])
    assert writer.close() is None
    assert indices(folder) == [0, 1, 2]


def test_a_file_that_was_cut_is_noticed(writer, folder):
    path = folder / "attempt_000001.jsonl"
    writer.append([line(index) for index in range(3)])
    os.truncate(path, len(line(0)) + 1 + 5)
    writer.append([line(3)])
    left = writer.close()
    assert left.lost == "2 lines that were stored have been removed from outside"
    assert indices(folder) == [0, 3]


def test_a_number_that_now_means_a_file_of_the_users_is_let_alone(writer, folder, tmp_path):
    """In local mode, user code that closes all files is followed by user code that opens one."""
    writer.append([line(0)])
    fd = writer._fd
    os.close(fd)
    other = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert other == fd
    try:
        writer.append([line(1)])
        assert writer.close() is None
        os.write(other, b"mine")
    finally:
        os.close(other)
    assert (tmp_path / "theirs").read_bytes() == b"mine"
    assert indices(folder) == [0, 1]


# A number is the space left on the disk.
EVENTS = st.lists(st.sampled_from(["report", "report", "remove", "free"]) | st.integers(0, 120), max_size=25)


@given(events=EVENTS, look_interval_s=st.sampled_from([0.0, 1e9]))
def test_no_line_is_lost_or_doubled_by_full_disks_and_removed_folders(events, look_interval_s, tmp_path_factory):
    folder = tmp_path_factory.mktemp("storage") / "run" / "metrics"
    writer = FileHistoryWriter(str(folder / "attempt_000001.jsonl"), look_interval_s=look_interval_s)
    num_reports = 0
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        for event in events:
            if event == "report":
                writer.append([line(num_reports)])
                num_reports += 1
            elif event == "remove":
                shutil.rmtree(folder.parent, ignore_errors=True)
            else:
                disk.space = 1 << 60 if event == "free" else event
                writer.flush()
        left = writer.close()
    if left is not None:
        assert left.lost == ""
        put_back(left, folder)
    assert indices(folder) == list(range(num_reports))


# -- object stores -------------------------------------------------------------------------------


def segments(files: Files) -> SegmentHistoryWriter:
    return SegmentHistoryWriter(files, "/runs/run/metrics/attempt_000001", interval_s=1e6)


def test_lines_that_a_store_refused_become_its_next_segment():
    plan = FaultPlan()
    files = RemoteFiles(FaultyFileSystem(MemoryFileSystem(), plan), RetryPolicy(max_attempts=1))
    writer = segments(files)
    writer.append([line(0)])
    writer.flush()
    plan.error_rate = 1.0
    writer.append([line(1), line(2)])
    left = writer.close()
    assert (left.file_name, left.lines, left.lost) == (
        "attempt_000001_000001.jsonl",
        line(1) + b"\n" + line(2) + b"\n",
        "",
    )
    assert left.reason
    files = RemoteFiles(MemoryFileSystem())
    files.write(f"/runs/run/metrics/{left.file_name}", left.lines)
    rows = RunStore(StorageRoot("memory://runs"), "run").read_history()
    assert [row.report_index for row in rows] == [0, 1, 2]
    assert writer.close() is None


def test_segments_that_somebody_removed_are_counted_at_the_end():
    files = RemoteFiles(MemoryFileSystem())
    writer = segments(files)
    for index in range(3):
        writer.append([line(2 * index), line(2 * index + 1)])
        writer.flush()
    files.remove("/runs/run/metrics/attempt_000001_000001.jsonl")
    left = writer.close()
    assert (left.lost, left.lines) == ("2 lines that were stored have been removed from outside", b"")
    assert writer.close() is None


def test_a_store_that_cannot_be_listed_at_the_end_has_lost_nothing():
    plan = FaultPlan()
    writer = segments(RemoteFiles(FaultyFileSystem(MemoryFileSystem(), plan), RetryPolicy(max_attempts=1)))
    writer.append([line(0)])
    writer.flush()
    plan.error_rate = 1.0
    assert writer.close() is None


def test_numbers_over_the_ranks_find_their_row_behind_a_gap():
    """Reports 1 to 3 were lost, and what follows is not shifted."""
    over_ranks = json.dumps({"i": 5, "a": {"x/mean": 1.0}}).encode()
    rows = read_rows([(1, b"\n".join([line(0), line(4), line(5), over_ranks]))])
    assert [row.over_ranks for row in rows] == [{}, {}, {"x/mean": 1.0}]


# -- the books -----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path) -> RunStore:
    return RunStore(StorageRoot(str(tmp_path / "storage")), "run")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path / "elsewhere"))
    monkeypatch.setattr(ledger_module, "_SECOND_RESCUE_ROOT", str(tmp_path / "memory"))
    return tmp_path / "elsewhere"


def open_ledger(store, **options) -> Ledger:
    options = {"resume": "auto", "metrics_over_ranks": (), **options}
    ledger = Ledger(
        RunStore(store.root, store.name),
        run_id="r" * 32,
        checkpoint_config=CheckpointConfig(),
        config_record={},
        start_checkpoint=None,
        wants_reports=False,
        **options,
    )
    ledger.open()
    return ledger


def report(index, part=None, **metrics) -> bytes:
    return encode_report(index, 1.0, json.dumps(metrics), part)


def uploaded(store, tmp_path, index, attempt=1, content=b"w") -> Part:
    folder = tmp_path / f"source-{index}-{attempt}"
    folder.mkdir(exist_ok=True)
    (folder / "w").write_bytes(content)
    return Part(uploaded=store.upload(Checkpoint.from_directory(folder), report_index=index, attempt=attempt))


def texts(events, level) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice) and event.level == level]


def commits(events) -> list[int]:
    return [event.report_index for event in events if isinstance(event, CheckpointCommitted)]


def test_lines_that_the_disk_refused_are_rescued_and_the_run_is_a_success(store, disk, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    disk.space = 100
    for index in range(10):
        ledger.add(0, [report(index, loss=index)])
    ledger.rank_finished(0)
    events = ledger.end_attempt()
    assert texts(events, logging.ERROR) == []
    (warning,) = texts(events, logging.WARNING)
    (rescued,) = elsewhere.rglob("*.jsonl")
    assert f"could not be stored in {store.path}/metrics: [Errno 28] No space left on device" in warning
    assert f"; they lie in {rescued} on " in warning
    assert rescued.parent.name == f"run-{'r' * 32}"
    assert rescued.parent.stat().st_mode & 0o077 == 0
    ledger.close("finished")
    assert ledger.last_metrics == {"loss": 9}
    # What the warning says to do.
    shutil.copy(rescued, Path(store.path, "metrics"))
    result = train.Result.from_path(store.path)
    assert [row["loss"] for row in result.metrics_history] == list(range(10))


def test_the_last_metrics_are_known_whatever_became_of_the_storage(store, disk, elsewhere, tmp_path):
    ledger = open_ledger(store)
    assert ledger.last_metrics is None
    ledger.begin_attempt(1)
    assert ledger.last_metrics is None
    ledger.add(0, [report(0, uploaded(store, tmp_path, 0), loss=0), report(1, loss=float("inf"))])
    assert ledger.last_metrics == {"loss": float("inf")}
    ledger.end_attempt()
    # What was reported behind the checkpoint is done again.
    ledger.begin_attempt(1)
    assert ledger.last_metrics == {"loss": 0}
    disk.space = 0
    ledger.add(0, [report(1, loss=2)])
    shutil.rmtree(store.path)
    ledger.end_attempt()
    ledger.close("failed")
    assert ledger.last_metrics == {"loss": 2}


def test_reports_that_no_place_takes_end_the_run_with_what_there_is(store, disk, elsewhere, tmp_path, caplog):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0, uploaded(store, tmp_path, 0))])
    disk.space = 0
    for place in (elsewhere, tmp_path / "memory"):
        place.write_bytes(b"no folder can be made here")
    ledger.add(0, [report(1), report(2)])
    ledger.rank_finished(0)
    (error,) = texts(ledger.end_attempt(), logging.ERROR)
    assert error.startswith(f"2 lines of history (of rank 0) could not be stored in {store.path}/metrics: [Errno 28]")
    assert f"; nor elsewhere: {elsewhere}: [Errno 20] Not a directory" in error
    with pytest.raises(StorageError, match=r"has finished, but 2 lines .*newest checkpoint is checkpoint_000000"):
        ledger.close("finished")
    record = store.read_record()
    assert (record.state, "2 lines of history" in record.error) == ("failed", True)
    assert not Path(store.path, ".lock.json").exists()
    ledger.close("failed")


def test_reports_that_no_place_took_and_that_were_made_again_are_no_loss(store, disk, elsewhere, tmp_path):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0, uploaded(store, tmp_path, 0))])
    disk.space = 0
    for place in (elsewhere, tmp_path / "memory"):
        place.write_bytes(b"no folder can be made here")
    ledger.add(0, [report(1)])
    assert len(texts(ledger.end_attempt(), logging.ERROR)) == 1
    disk.space = 1 << 60
    ledger.begin_attempt(1)
    ledger.add(0, [report(1)])
    assert ledger.end_attempt() == []
    ledger.close("finished")


def test_a_user_error_is_not_replaced_by_what_could_not_be_stored(store, disk, elsewhere, tmp_path):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    disk.space = 0
    for place in (elsewhere, tmp_path / "memory"):
        place.write_bytes(b"no folder can be made here")
    ledger.add(0, [report(0)])
    ledger.end_attempt()
    ledger.close("failed", "ValueError: theirs")
    assert store.read_record().error == "ValueError: theirs"


def test_a_full_temporary_folder_is_followed_by_memory(tmp_path, monkeypatch):
    writer = FileHistoryWriter(str(tmp_path / "gone" / "attempt_000002.jsonl"))
    (tmp_path / "gone").write_bytes(b"")
    writer.append([line(7)])
    left = writer.close()
    (tmp_path / "full").write_bytes(b"")
    path = rescue(left, "mine", [str(tmp_path / "full"), str(tmp_path / "memory")])
    assert path == str(tmp_path / "memory" / "mine" / "attempt_000002_000001.jsonl")
    assert Path(path).read_bytes() == line(7) + b"\n"


def test_an_end_without_order_stores_what_waits(elsewhere):
    """Ctrl-C, an error of the library's own: only close() is called."""
    store = RunStore(StorageRoot("memory://runs"), "run")
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0), report(1)])
    ledger.close("interrupted")
    assert [row.report_index for row in store.read_history()] == [0, 1]


def test_a_conflict_at_the_end_costs_no_history(tmp_path, elsewhere):
    store = RunStore(StorageRoot("memory://runs"), "run")
    ledger = open_ledger(store)
    ledger.begin_attempt(2)
    ledger.add(0, [report(0, uploaded(store, tmp_path, 0, content=b"1"))])
    late = attrs.evolve(uploaded(store, tmp_path, 0, content=b"2"), is_pending=True)
    ledger.add(1, [report(0, late)])
    with pytest.raises(CheckpointConflictError):
        ledger.end_attempt()
    ledger.close("failed")
    assert [row.report_index for row in store.read_history()] == [0]


def test_a_removed_run_is_told_with_the_checkpoints_it_held(store, tmp_path, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    for index in range(2):
        ledger.add(0, [report(index, uploaded(store, tmp_path, index))])
    shutil.rmtree(store.path)
    ledger.add(0, [report(2)])
    ledger.rank_finished(0)
    assert texts(ledger.end_attempt(), logging.ERROR) == [
        f"2 committed checkpoints are no longer in {store.path}, removed by somebody while the run went on: "
        "'checkpoint_000000', 'checkpoint_000001'"
    ]
    assert ledger.checkpoints() == []
    assert ledger.begin_attempt(1)[0].first_report_index == 0
    ledger.close("finished")


def test_old_checkpoints_that_the_user_removes_are_no_error(store, tmp_path, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    for index in range(2):
        ledger.add(0, [report(index, uploaded(store, tmp_path, index))])
    shutil.rmtree(Path(store.path, "checkpoint_000000"))
    events = ledger.end_attempt()
    assert texts(events, logging.ERROR) == []
    assert "1 committed checkpoints are no longer in" in texts(events, logging.WARNING)[0]
    ledger.close("finished")


def test_checkpoints_none_of_which_can_be_used_are_not_kept_in_mind(store, tmp_path, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0, uploaded(store, tmp_path, 0))])
    ledger.end_attempt()
    Path(store.path, "checkpoint_000000", "w").write_bytes(b"x")
    assert ledger.begin_attempt(1)[0].first_report_index == 0
    assert ledger.checkpoints() == []
    ledger.close("finished")


def test_a_commit_that_failed_is_tried_again_at_the_end(store, tmp_path, monkeypatch, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    monkeypatch.setattr(RunStore, "commit", _refuse)
    events = ledger.add(0, [report(0, uploaded(store, tmp_path, 0), loss=1)])
    assert "was not committed" in texts(events, logging.ERROR)[0]
    monkeypatch.undo()
    assert commits(ledger.end_attempt()) == [0]
    assert ledger.begin_attempt(1)[0].first_report_index == 1
    ledger.close("finished")


def test_a_second_failure_of_a_commit_is_not_told_again(store, tmp_path, monkeypatch, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    monkeypatch.setattr(RunStore, "commit", _refuse)
    ledger.add(0, [report(0, uploaded(store, tmp_path, 0))])
    assert ledger.end_attempt() == []
    ledger.close("finished")


def test_an_older_checkpoint_is_not_committed_behind_a_newer_one(store, tmp_path, monkeypatch, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    with monkeypatch.context() as patched:
        patched.setattr(RunStore, "commit", _refuse)
        ledger.add(0, [report(0, uploaded(store, tmp_path, 0))])
    assert commits(ledger.add(0, [report(1, uploaded(store, tmp_path, 1))])) == [1]
    assert ledger.end_attempt() == []
    ledger.close("finished")


def _refuse(*_, **__):
    raise StorageError("503")


# -- reading it later ------------------------------------------------------------------------------


def test_a_run_whose_record_could_not_be_written_can_be_read(store, disk, elsewhere, monkeypatch, caplog):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0, loss=1)])
    disk.space = 0
    ledger.add(0, [report(1, loss=2)])
    ledger.end_attempt()
    monkeypatch.setattr(RunStore, "write_record", _refuse)
    ledger.close("finished")
    assert "the run record could not be written" in caplog.text
    result = train.Result.from_path(store.path)
    assert (result.metrics, result.error, result.metrics_history) == ({"loss": 1}, None, [{"loss": 1}])


def test_the_record_knows_the_last_metrics_where_the_history_lacks_its_end(store, disk, elsewhere):
    ledger = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0, loss=1)])
    disk.space = 0
    ledger.add(0, [report(1, loss=2)])
    ledger.end_attempt()
    ledger.close("finished")
    result = train.Result.from_path(store.path)
    assert (result.metrics, result.metrics_history) == ({"loss": 2}, [{"loss": 1}])
