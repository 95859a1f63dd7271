"""A forked child holds the context object, and neither reports for its parent nor waits for threads it lacks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_lite.train import Checkpoint, NotInTrainFunctionError, TrainContext
from ray_lite.train.configs import ScalingConfig
from ray_lite.train.context.identity import RunIdentity, WorkerIdentity
from ray_lite.train.context.journal import Journal, read_tail
from ray_lite.train.context.outbox import Outbox
from ray_lite.train.context.preemption import Notices
from ray_lite.train.context.reporter import Reporter
from ray_lite.train.context.scratch import Scratch
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    # It is what this file is about.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


class Rank:
    """All that a worker has, but for Ray; beats and meetings are counted where a child would be seen too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.received = folder, list[bytes]()
        self.num_signs = multiprocessing.get_context("fork").Value("i", 0)
        self.outbox = Outbox(lambda first, records: self.received.extend(records), Journal(folder / "j"))
        store = RunStore(StorageRoot(str(folder / "storage")), "run")
        self.reporter = Reporter(store, self.outbox, attempt=1, first_report_index=0, scratch=Scratch(folder / "j"))
        self.context = TrainContext(
            worker=WorkerIdentity(world_rank=3, world_size=4),
            run=RunIdentity(name="run", path=store.path, run_id="0" * 32, attempt=1),
            scaling_config=ScalingConfig(num_workers=4),
            store=store,
            reporter=self.reporter,
            shards={"made": lambda: [1], "later": lambda: [2]},
            notices=Notices(),
            meet=lambda kind, payload, timeout_s: self.sign(),
            beat=self.sign,
        )

    def sign(self) -> None:
        with self.num_signs.get_lock():
            self.num_signs.value += 1


@pytest.fixture
def rank(tmp_path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.reporter.finish()
    assert rank.outbox.close(30)


def in_child(call: Callable[[], Any]) -> Any:
    """What ``call()`` gives or raises in a forked child; fails when it does not answer."""
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001  # it is the answer
            answer = error
        sending.send(answer)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    try:
        assert receiving.poll(30), "the child waits for what is not there"
        return receiving.recv()
    finally:
        child.kill()
        child.join()
        receiving.close()
        sending.close()


CALLS: dict[str, Callable[[TrainContext, Path], Any]] = {
    "report()": lambda context, folder: context.report({"child": 1}),
    "report() of files": lambda context, folder: context.report({}, Checkpoint.from_directory(folder)),
    "get_all_reported_checkpoints()": lambda context, folder: context.get_all_reported_checkpoints(),
    "staging_directory()": lambda context, folder: context.staging_directory().__enter__(),
    "get_dataset_shard()": lambda context, folder: context.get_dataset_shard("later"),
    "train.collective": lambda context, folder: context.meet("barrier", None, 1.0),
    "heartbeat()": lambda context, folder: context.heartbeat(),
    "get_preemption_info()": lambda context, folder: context.get_preemption_info(),
    "should_checkpoint()": lambda context, folder: context.should_checkpoint(),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_speaks_with_the_controller_is_refused(rank, tmp_path, name):
    """Also when the locks were taken at the moment of the fork: nobody is left to give them back."""
    rank.context.report({"parent": 0})
    assert rank.outbox.flush(30)
    reporter, outbox, context = rank.reporter, rank.outbox, rank.context
    taken, done = threading.Event(), threading.Event()

    def take_locks() -> None:
        with reporter._lock, outbox._changed, reporter._uploads._changed, context._shards_lock:
            taken.set()
            assert done.wait(60)

    other = threading.Thread(target=take_locks)
    other.start()
    assert taken.wait(30)
    try:
        error = in_child(lambda: CALLS[name](context, tmp_path))
    finally:
        done.set()
        other.join()
    assert isinstance(error, NotInTrainFunctionError)
    assert str(error).startswith(name.removesuffix(" of files"))
    assert "forked child of the train function's process" in str(error)
    assert rank.num_signs.value == 0


def test_the_journal_holds_what_the_parent_reported_and_no_more(rank, tmp_path):
    for i in range(3):
        rank.context.report({"parent": i})
        assert isinstance(in_child(lambda: rank.context.report({"child": 1})), NotInTrainFunctionError)
    assert rank.outbox.flush(30)
    assert read_tail(tmp_path / "j", after=0) == rank.received
    assert len(rank.received) == 3


def test_what_only_reads_works_in_the_child(rank):
    made = rank.context.get_dataset_shard("made")
    found = in_child(
        lambda: (
            rank.context.get_world_rank(),
            rank.context.get_world_size(),
            rank.context.get_experiment_name(),
            rank.context.get_checkpoint(),
            rank.context.get_dataset_shard("made"),
        )
    )
    assert found == (3, 4, "run", None, made)


def test_a_child_that_leaves_the_block_leaves_the_folder_to_its_parent(rank):
    """As a child does whose sys.exit() unwinds the blocks in which it was forked."""
    block = rank.context.staging_directory()
    folder = block.__enter__()
    (folder / "w").write_text("1")
    assert in_child(lambda: block.__exit__(None, None, None)) is False
    assert (folder / "w").read_text() == "1"
    block.__exit__(None, None, None)
    assert not folder.path.exists()
