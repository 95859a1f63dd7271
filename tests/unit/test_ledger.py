"""The books of a run: what is complete is committed, what cannot be written is said, nothing is counted twice."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ray_lite.train.configs import CheckpointConfig
from ray_lite.train.context.journal import DIR_VARIABLE
from ray_lite.train.context.records import Part, encode_report, encode_upload_end, parse_record
from ray_lite.train.errors import StorageError
from ray_lite.train.execution.ledger import Ledger
from ray_lite.train.execution.messages import CheckpointCommitted, Notice
from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.clock import ManualClock


@pytest.fixture
def store(tmp_path):
    return RunStore(StorageRoot(str(tmp_path / "storage")), "run")


def open_ledger(store, *, clock=None, **options):
    options = {"checkpoint_config": CheckpointConfig(), "config_record": {}, "start_checkpoint": None, **options}
    options = {"resume": "auto", "wants_reports": False, "run_id": "r", **options}
    ledger = Ledger(RunStore(store.root, store.name), clock=clock or ManualClock(), **options)
    return ledger, ledger.open()


def uploaded(store, tmp_path, index, *, attempt=1, digests=True, **files):
    folder = tmp_path / f"source-{index}-{len(files)}"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    checkpoint = Checkpoint.from_directory(folder)
    return store.upload(checkpoint, report_index=index, attempt=attempt, digests=digests)


def report(index, part=None, **metrics):
    return encode_report(index, 1.0, json.dumps(metrics), part)


def texts(events, level=logging.INFO):
    return [event.text for event in events if isinstance(event, Notice) and event.level == level]


def commits(events):
    return [event.report_index for event in events if isinstance(event, CheckpointCommitted)]


LARGE = b"x" * (8 << 20)


def test_files_without_checksums_are_committed_when_those_have_come(store, tmp_path):
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    part = uploaded(store, tmp_path, 0, digests=False, w=LARGE)
    assert not part.has_digests
    record = report(0, Part(uploaded=part, is_pending=True), loss=1)
    assert parse_record(record).part == Part(uploaded=part, is_pending=True)
    assert commits(ledger.add(0, [record])) == []
    assert ledger.reported(1) == ([], [0])
    assert ledger.reported(0) == ([], [])
    whole = store.add_digests(part)
    assert commits(ledger.add(0, [encode_upload_end(0, Part(uploaded=whole))])) == [0]
    assert ledger.reported(1) == ([("checkpoint_000000", {"loss": 1})], [])
    ledger.rank_finished(0)
    ledger.end_attempt()
    ledger.close("finished")


def test_durable_files_of_a_killed_worker_get_their_checksums_here(store, tmp_path):
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    part = uploaded(store, tmp_path, 0, digests=False, w=LARGE)
    ledger.add(0, [report(0, Part(uploaded=part, is_pending=True))])
    ledger.add(0, [report(1, Part(is_pending=True))])
    events = ledger.end_attempt()
    # Report 1 was handed over, and its files had not arrived.
    assert commits(events) == [0]
    assert texts(events, logging.WARNING) == []
    (committed,) = store.list_checkpoints()
    store.open_checkpoint(committed).verify()
    assert committed.manifest.files[0].crc32
    ledger.close("failed")


def test_an_upload_that_failed_behind_the_scenes_holds_nothing_up(store, tmp_path):
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    part = uploaded(store, tmp_path, 1, w=b"1")
    events = ledger.add(0, [report(0, Part(is_pending=True)), report(1, Part(uploaded=part))])
    assert commits(events) == []
    events = ledger.add(0, [encode_upload_end(0, Part(failure="403"))])
    assert commits(events) == [1]
    assert texts(events, logging.WARNING) == ["report 0 has no checkpoint: the upload of rank 0 failed (403)"]
    ledger.close("finished")


def test_whose_reports_a_checkpoint_waits_for(store, tmp_path):
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(3)
    ledger.add(1, [report(0, Part(uploaded=uploaded(store, tmp_path, 0, w=b"1")))])
    assert ledger.reported(1)[1] == [0, 2]
    ledger.rank_finished(2)
    assert ledger.reported(1)[1] == [0]
    assert commits(ledger.add(0, [report(0, loss=1)])) == [0]
    assert ledger.reported(1)[1] == []
    ledger.close("finished")


def test_one_line_says_what_was_found(store, tmp_path):
    clock = ManualClock()
    ledger, events = open_ledger(store, clock=clock)
    assert events == []
    assert ledger.begin_attempt(1)[1] == []
    ledger.add(0, [report(0, Part(uploaded=uploaded(store, tmp_path, 0, w=b"1")))])
    ledger.close("finished")
    clock.sleep(180)
    ledger, events = open_ledger(store, clock=clock)
    assert events == []
    start, events = ledger.begin_attempt(1)
    assert texts(events) == [f"continuing from checkpoint_000000 (report 0, 3 min old) in {store.path}"]
    assert (start.attempt, start.first_report_index) == (2, 1)
    ledger.close("finished")


def test_a_run_without_a_checkpoint_is_begun_again_and_one_line_says_so(store):
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.close("failed")
    ledger, events = open_ledger(store)
    assert texts(events) == [f"{store.path} holds a run without a checkpoint: training begins from nothing"]
    assert ledger.begin_attempt(1)[1] == []
    ledger.close("finished")


def test_changed_options_are_named_once(store):
    old = {"scaling_config": {"num_workers": 2, "use_gpu": False, "resources_per_worker": {"CPU": 1}}, "gone": {"a": 1}}
    new = {"scaling_config": {"num_workers": 4, "use_gpu": False, "resources_per_worker": {"CPU": 2}}, "new": {"b": 1}}
    ledger, _ = open_ledger(store, config_record=old)
    ledger.begin_attempt(1)
    ledger.close("failed")
    ledger, events = open_ledger(store, config_record=new)
    assert texts(events)[0] == (
        "since the last fit() of run these options have changed: scaling_config.num_workers 2 -> 4, "
        "scaling_config.resources_per_worker"
    )
    ledger.close("finished")


@pytest.mark.parametrize("damage", [b"", b"{", None], ids=["empty", "cut", "missing"])
def test_a_damaged_run_record_is_rebuilt_from_the_manifests(store, tmp_path, damage):
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0, Part(uploaded=uploaded(store, tmp_path, 0, w=b"1")), loss=0.5)])
    ledger.close("finished")
    record = Path(store.path, "run.json")
    record.unlink() if damage is None else record.write_bytes(damage)
    ledger, events = open_ledger(store)
    assert "no usable run.json" in texts(events, logging.WARNING)[0]
    start, _ = ledger.begin_attempt(1)
    assert (start.attempt, start.first_report_index) == (2, 1)
    assert store.read_record().metrics == {"loss": 0.5}
    ledger.close("finished")


def test_must_wants_a_checkpoint_that_is_whole(store, tmp_path):
    with pytest.raises(StorageError, match=r'resume="must", but .* holds no checkpoint'):
        open_ledger(store, resume="must")
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    ledger.add(0, [report(0, Part(uploaded=uploaded(store, tmp_path, 0, w=b"1")))])
    ledger.close("finished")
    ledger, _ = open_ledger(store, resume="must")
    assert ledger.begin_attempt(1)[0].checkpoint is not None
    ledger.close("finished")
    Path(store.path, "checkpoint_000000", "w").write_bytes(b"2")
    ledger, _ = open_ledger(store, resume="must")
    with pytest.raises(StorageError, match=r"every checkpoint .* is damaged"):
        ledger.begin_attempt(1)
    ledger.close("failed")
    assert not Path(store.path, ".lock.json").exists()


def test_a_score_that_is_missing_is_told_once_with_what_there_is(store, tmp_path):
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val/loss", checkpoint_score_order="min")
    ledger, _ = open_ledger(store, checkpoint_config=config)
    ledger.begin_attempt(1)
    warnings = []
    for index, metrics in enumerate([{"val": {"loss": 1}}, {"loss": 0.1, "acc": 1}, {"loss": 0.1}]):
        part = Part(uploaded=uploaded(store, tmp_path, index, w=b"1"))
        warnings += texts(ledger.add(0, [report(index, part, **metrics)]), logging.WARNING)
    assert warnings == [
        "checkpoint_score_attribute='val/loss' is no number in the metrics of report 1, which has 'loss', 'acc'; "
        "such a checkpoint counts as the worst"
    ]
    ledger.close("finished")


def test_a_checkpoint_that_nobody_read_is_told_once(store, tmp_path):
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    assert ledger.checkpoint_was_read(False) == []
    ledger.add(0, [report(0, Part(uploaded=uploaded(store, tmp_path, 0, w=b"1")))])
    ledger.end_attempt()
    ledger.begin_attempt(1)
    assert ledger.checkpoint_was_read(True) == []
    (warning,) = texts(ledger.checkpoint_was_read(False), logging.WARNING)
    assert "no rank called train.get_checkpoint()" in warning
    assert ledger.checkpoint_was_read(False) == []
    ledger.close("finished")


def test_what_cannot_be_written_at_the_end_does_not_undo_a_finished_run(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path / "elsewhere"))
    ledger, _ = open_ledger(store)
    ledger.begin_attempt(1)
    # A folder where the history's file should be, and one where the record should be.
    history = Path(store.path, "metrics", "attempt_000001.jsonl")
    history.mkdir(parents=True)
    record = Path(store.path, "run.json")
    record.unlink()
    (record / "in the way").mkdir(parents=True)
    ledger.add(0, [report(0, loss=1)])
    ledger.rank_finished(0)
    assert "1 lines of history (of rank 0) could not be stored" in texts(ledger.end_attempt(), logging.WARNING)[0]
    ledger.close("finished")
    assert "the run record could not be written" in caplog.text
    # The lock is given back all the same.
    assert not Path(store.path, ".lock.json").exists()
