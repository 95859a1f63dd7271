"""A rank that waits for storage or for the controller says so; one that hangs does not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from ray_lite.train import Checkpoint, CheckpointUploadMode, TrainContext, UploadError
from ray_lite.train.configs import ScalingConfig
from ray_lite.train.context import beats, ownership
from ray_lite.train.context.identity import RunIdentity, WorkerIdentity
from ray_lite.train.context.journal import Journal
from ray_lite.train.context.outbox import Outbox
from ray_lite.train.context.reporter import Reporter
from ray_lite.train.context.scratch import Scratch
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

ASYNC = CheckpointUploadMode.ASYNC


class Rank:
    """A worker whose uploads, and whose way to the controller, can be held up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_beats = folder, 0
        self.storage, self.controller = threading.Event(), threading.Event()
        self.storage.set()
        self.controller.set()
        self.outbox = Outbox(self.send, Journal(folder / "j"), max_pending_bytes=200, beat=self.beat)
        self.store = RunStore(StorageRoot(str(folder / "storage")), "run")
        self.reporter = Reporter(
            self.store,
            self.outbox,
            attempt=1,
            first_report_index=0,
            scratch=Scratch(folder / "j"),
            beat=self.beat,
        )
        self.context = TrainContext(
            worker=WorkerIdentity(),
            run=RunIdentity(name="run", path=self.store.path, run_id="0" * 32, attempt=1),
            scaling_config=ScalingConfig(num_workers=1),
            store=self.store,
            reporter=self.reporter,
            shards={},
        )
        self.num_folders = 0

    def beat(self) -> None:
        self.num_beats += 1

    def send(self, first: int, records: Any) -> None:
        assert self.controller.wait(30)

    def upload(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        assert self.storage.wait(30)
        return Checkpoint(shutil.copytree(checkpoint.path, f"{self.store.path}/{name}"))

    def report_files(self, mode: CheckpointUploadMode = CheckpointUploadMode.SYNC) -> None:
        self.num_folders += 1
        folder = self.folder / f"mine-{self.num_folders}"
        folder.mkdir()
        (folder / "w").write_text("1")
        self.context.report(
            {}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode, checkpoint_upload_fn=self.upload
        )

    def fill_uploads(self) -> None:
        """One upload is under way, and as many wait as may."""
        self.report_files(ASYNC)
        wait_until(lambda: not self.reporter._uploads._waiting, "the first has begun")
        for _ in range(2):
            self.report_files(ASYNC)

    def fill_outbox(self) -> None:
        """One batch is under way, and as many bytes wait as may."""
        self.context.report({"first": 1})
        wait_until(lambda: not self.outbox._pending, "it is under way")
        self.context.report({"x": "x" * 200})


@pytest.fixture
def rank(tmp_path, monkeypatch) -> Iterator[Rank]:
    monkeypatch.setattr(beats, "_BEAT_S", 0.01)
    rank = Rank(tmp_path)
    yield rank
    rank.storage.set()
    rank.controller.set()
    rank.reporter.finish()
    assert rank.outbox.close(30)
    assert beat_threads() == []


def beat_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ray_lite-beats"]


def wait_for_sync_upload(rank: Rank) -> None:
    rank.report_files()


def wait_for_earlier_uploads(rank: Rank) -> None:
    rank.report_files(ASYNC)


def wait_for_a_full_queue(rank: Rank) -> None:
    rank.context.report({"next": 1})


def wait_for_arrival(rank: Rank) -> None:
    rank.reporter.flush(30)


def wait_at_the_end(rank: Rank) -> None:
    rank.reporter.finish()


def wait_after_a_failure(rank: Rank) -> None:
    rank.reporter.give_up(30)


def wait_for_the_uploads(rank: Rank) -> None:
    rank.reporter.wait(None)


def wait_for_what_is_reported(rank: Rank) -> None:
    rank.context.get_all_reported_checkpoints()


STORAGE = [
    wait_for_sync_upload,
    wait_for_earlier_uploads,
    wait_at_the_end,
    wait_after_a_failure,
    wait_for_the_uploads,
    wait_for_what_is_reported,
]
CONTROLLER = [wait_for_a_full_queue, wait_for_arrival, wait_for_what_is_reported]


def beats_while_it_waits(rank: Rank, call: Callable[[Rank], None], gate: threading.Event) -> None:
    returned = threading.Event()
    thread = threading.Thread(target=lambda: (call(rank), returned.set()))
    thread.start()
    seen = rank.num_beats
    # Again and again: one beat at the start would not last through a long wait.
    wait_until(lambda: rank.num_beats > seen + 5, "it beats")
    assert not returned.is_set()
    gate.set()
    thread.join(30)
    assert returned.is_set()


@pytest.mark.parametrize("call", STORAGE)
def test_who_waits_for_storage_beats(rank, call):
    rank.storage.clear()
    if call is not wait_for_sync_upload:
        rank.fill_uploads()
    beats_while_it_waits(rank, call, rank.storage)


@pytest.mark.parametrize("call", CONTROLLER)
def test_who_waits_for_the_controller_beats(rank, call):
    rank.controller.clear()
    rank.fill_outbox()
    beats_while_it_waits(rank, call, rank.controller)


def test_a_long_copy_of_a_folder_that_is_taken_over_beats(rank, monkeypatch):
    """The part of an ASYNC report that the train function waits for."""
    gate = threading.Event()
    monkeypatch.setattr(ownership, "_copy", lambda sources, target: gate.wait(30))
    folder = rank.folder / "kept"
    folder.mkdir()

    def call(rank: Rank) -> None:
        rank.context.report(
            {},
            Checkpoint.from_directory(folder),
            checkpoint_upload_mode=ASYNC,
            delete_local_checkpoint_after_upload=False,
        )

    beats_while_it_waits(rank, call, gate)


def test_an_upload_behind_the_scenes_does_not_speak_for_the_train_function(rank):
    """It may go on while the training hangs."""
    rank.storage.clear()
    rank.report_files(ASYNC)
    wait_until(lambda: not rank.reporter._uploads._waiting, "it has begun")
    seen = rank.num_beats
    assert beat_threads() == []
    rank.storage.set()
    wait_until(lambda: not rank.reporter.num_pending, "it has ended")
    assert rank.num_beats == seen


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_beats_end_with_the_upload_however_it_ends(rank, error):
    def fail(checkpoint: Checkpoint, name: str) -> Checkpoint:
        assert beat_threads() == ["ray_lite-beats"]
        raise error("no")

    folder = rank.folder / "mine"
    folder.mkdir()
    with pytest.raises((UploadError, SystemExit)):
        rank.context.report({}, Checkpoint.from_directory(folder), checkpoint_upload_fn=fail)
    assert beat_threads() == []


def test_a_report_without_files_starts_no_thread(rank, monkeypatch):
    rank.context.report({"warm": 1})

    def refuse(self: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rank.context.report({"loss": 1.0})
    monkeypatch.undo()


def test_where_no_thread_can_be_started_files_go_up_in_silence(rank, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        rank.report_files()
    assert rank.reporter.newest_checkpoint is not None


def test_where_nobody_looks_for_signs_no_thread_beats():
    """Local mode promises a debugger that there is one thread."""
    with beats.beating(beats.silent):
        assert beat_threads() == []


def test_a_wait_ends_in_time_and_says_what_it_saw():
    changed, signs = threading.Condition(), list[int]()
    with changed:
        assert not beats.wait_for(changed, lambda: False, 0.0, lambda: signs.append(1))
        assert beats.wait_for(changed, lambda: True, 0.0, lambda: signs.append(1))
        assert beats.wait_for(changed, lambda: len(signs) > 1, None, lambda: signs.append(1))
