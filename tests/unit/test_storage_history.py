"""The history: every line once, in order, whatever happens to the process or the storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.storage.history import FileHistoryWriter, SegmentHistoryWriter, read_rows
from ray_lite.train.storage.remote import RemoteFiles
from ray_lite.train.storage.retry import RetryPolicy
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem


@pytest.fixture(autouse=True)
def _empty_memory():
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path) -> RunStore:
    root = StorageRoot(str(tmp_path)) if request.param == "local" else StorageRoot("memory://runs")
    return RunStore(root, "run")


def line(index, **metrics) -> bytes:
    return json.dumps({"i": index, "t": index + 0.5, "m": metrics}).encode()


def write(store, attempt, lines):
    writer = store.history_writer(attempt)
    writer.append(lines)
    writer.close()


def test_every_report_comes_back_in_order(store):
    writer = store.history_writer(1)
    for index in range(100):
        writer.append([line(index, loss=float("nan") if index == 3 else index)])
        if index % 30 == 0:
            writer.flush()
    writer.close()
    rows = store.read_history()
    assert [row.report_index for row in rows] == list(range(100))
    assert str(rows[3].metrics["loss"]) == "nan"
    assert (rows[5].time, rows[5].attempt) == (5.5, 1)


def test_late_metrics_appear(store):
    """Case 45."""
    write(store, 1, [line(index, i=index, **({"val": index} if index % 3 == 2 else {})) for index in range(6)])
    assert [row.metrics.get("val") for row in store.read_history()] == [None, None, 2, None, None, 5]


def test_a_later_attempt_replaces_what_it_repeats(store):
    write(store, 1, [line(index, from_=1) for index in range(5)])
    write(store, 2, [line(index, from_=2) for index in range(3, 7)])
    write(store, 3, [line(index, from_=3) for index in range(6, 8)])
    rows = store.read_history()
    assert [(row.report_index, row.attempt) for row in rows] == [
        (0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3),
    ]  # fmt: skip


def test_no_history_is_no_error(store):
    assert store.read_history() == []
    write(store, 1, [])
    assert store.read_history() == []


@given(st.integers(0, 200), st.binary(max_size=5))
def test_a_torn_end_costs_the_last_line_only(cut, rubbish):
    whole = b"\n".join(line(index) for index in range(4)) + b"\n"
    data = whole[: len(whole) - min(cut, len(line(3)))]
    rows = [row.report_index for row in read_rows([(1, data), (2, rubbish.replace(b"\n", b""))])]
    assert rows[:3] == [0, 1, 2]


def test_a_file_that_ends_in_half_a_line_is_continued_on_a_new_one(tmp_path):
    path = str(tmp_path / "attempt_000001.jsonl")
    with open(path, "wb") as file:
        file.write(line(0) + b"\n" + line(1)[:9])
    writer = FileHistoryWriter(path)
    writer.append([line(2)])
    writer.close()
    with open(path, "rb") as file:
        assert [row.report_index for row in read_rows([(1, file.read())])] == [0, 2]


_WRITER = """
import sys
from ray_lite.train.storage.history import FileHistoryWriter
writer = FileHistoryWriter(sys.argv[1])
for index in range(10_000_000):
    writer.append([b'{"i":%d,"t":0.0,"m":{}}' % index])
    if index == 1000:
        print("written", flush=True)
"""


def test_what_was_appended_survives_sigkill(tmp_path):
    path = str(tmp_path / "attempt_000001.jsonl")
    with subprocess.Popen([sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
    with open(path, "rb") as file:
        rows = read_rows([(1, file.read())])
    assert len(rows) > 1000
    assert [row.report_index for row in rows] == list(range(len(rows)))


def test_a_full_disk_costs_no_line(tmp_path, monkeypatch, caplog):
    path = str(tmp_path / "attempt_000001.jsonl")
    writer = FileHistoryWriter(path)
    writer.append([line(0)])
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]) if fail.pop() else _no_space())
    fail = [False, True, False, False]
    writer.append([line(1)])
    writer.append([line(2)])
    monkeypatch.setattr(os, "write", real)
    writer.append([line(3)])
    writer.close()
    with open(path, "rb") as file:
        assert [row.report_index for row in read_rows([(1, file.read())])] == [0, 1, 2, 3]
    assert caplog.text.count("wait in memory") == 1


def _no_space():
    raise OSError(28, "No space left on device")


def segments(plan: FaultPlan, **options) -> SegmentHistoryWriter:
    filesystem = FaultyFileSystem(MemoryFileSystem(), plan)
    files = RemoteFiles(filesystem, RetryPolicy(max_attempts=1))
    return SegmentHistoryWriter(files, "/runs/run/metrics/attempt_000001", **options)


def stored() -> list[int]:
    return [row.report_index for row in RunStore(StorageRoot("memory://runs"), "run").read_history()]


def test_a_segment_that_cannot_be_written_is_tried_again(caplog):
    plan = FaultPlan(error_rate=1.0)
    writer = segments(plan, interval_s=1e6)
    for index in range(3):
        writer.append([line(index)])
        writer.flush()
    plan.error_rate = 0.0
    writer.append([line(3)])
    writer.close()
    assert stored() == [0, 1, 2, 3]
    assert caplog.text.count("wait in memory") == 1


def test_a_store_that_refuses_for_long_costs_the_oldest_lines_and_no_memory(caplog):
    writer = segments(FaultPlan(error_rate=1.0), interval_s=1e6, max_waiting_bytes=2_000)
    for index in range(1_000):
        writer.append([line(index)])
    assert writer._waiting_bytes <= 2_000
    left = writer.close()
    num_dropped = 1_000 - left.num_lines
    assert left.lost == f"{num_dropped} lines came while 2000 bytes waited already, and were dropped"
    assert left.lines.endswith(line(999) + b"\n")
    assert "the oldest lines are lost" in caplog.text


def test_a_segment_is_written_as_soon_as_it_is_large():
    writer = segments(FaultPlan(), interval_s=1e6, max_segment_bytes=100)
    for index in range(10):
        writer.append([line(index)])
    # The writer's thread does it; wait for its end, not for a time.
    writer.close()
    assert stored() == list(range(10))


def test_30000_lines_a_second_are_no_burden(store):
    """Design: 10,000 reports/s per worker to disk. A tenth of the speed measured is demanded here."""
    writer = store.history_writer(1)
    lines = [line(index, loss=0.5, accuracy=0.25) for index in range(20_000)]
    start = time.perf_counter()
    for index in range(0, len(lines), 10):
        writer.append(lines[index : index + 10])
    writer.close()
    assert len(lines) / (time.perf_counter() - start) > 30_000
    assert len(store.read_history()) == 20_000
