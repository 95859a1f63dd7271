"""A report inside a report, of a signal handler say: refused with advice, never a wait for itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from waiting import wait_until

from ray_lite.train import Checkpoint, CheckpointUploadMode, TrainError, UploadError
from ray_lite.train.context.preemption import Notices, PreemptionInfo
from ray_lite.train.context.records import parse_record
from ray_lite.train.context.reporter import Reporter
from ray_lite.train.context.scratch import Scratch
from ray_lite.train.context.upload_mode import UploadOptions
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

ASYNC = CheckpointUploadMode.ASYNC


class Sink:
    """Keeps records, and lets something happen while it takes one."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.meanwhile: Callable[[], object] | None = None

    def add(self, record: bytes) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.records.append(record)

    def flush(self, timeout_s: float) -> bool:
        return True

    def indices(self) -> list[int]:
        return [parsed.report_index for parsed in map(parse_record, self.records) if parsed.line is not None]


class Bench:
    """A reporter on a local disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sink = folder, Sink()
        self.store = RunStore(StorageRoot(str(folder / "storage")), "run")
        self.reporter = Reporter(
            self.store, self.sink, attempt=1, first_report_index=0, scratch=Scratch(folder / "worker")
        )

    def checkpoint(self, name: str) -> Checkpoint:
        (self.folder / name).mkdir()
        (self.folder / name / "w").write_text(name)
        return Checkpoint.from_directory(self.folder / name)

    def store_by_hand(self, meanwhile: Callable[[], object] = lambda: None) -> Callable[[Checkpoint, str], Checkpoint]:
        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            meanwhile()
            return Checkpoint(shutil.copytree(checkpoint.path, f"{self.store.path}/{name}"))

        return upload

    def report_again(self) -> str:
        with pytest.raises(TrainError) as caught:
            self.reporter.report({"inner": 1})
        return str(caught.value)


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.reporter.finish()


def in_time(call: Callable[[], Any]) -> Any:
    """``call()`` in a thread of its own: one that waits for itself fails the test instead of holding it up."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(30)
    assert results, "the call waits for itself, or has failed"
    return results[0]


def test_a_report_while_a_record_is_queued_is_refused(bench):
    texts = []
    bench.sink.meanwhile = lambda: texts.append(bench.report_again())
    in_time(lambda: (bench.reporter.report({"outer": 1}),))
    in_time(lambda: (bench.reporter.report({"outer": 2}),))
    assert len(texts) == 1
    assert "Set a flag there, and report from the training loop" in texts[0]
    assert "get_preemption_info()" in texts[0]
    assert bench.sink.indices() == [0, 1]


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
def test_a_report_of_an_upload_is_refused_and_the_next_one_has_its_number(bench, mode):
    texts = []
    upload = bench.store_by_hand(lambda: texts.append(bench.report_again()))
    options = UploadOptions(mode=mode, upload_fn=upload)
    in_time(lambda: (bench.reporter.report({}, bench.checkpoint("a"), options),))
    assert bench.reporter.wait(30)
    in_time(lambda: (bench.reporter.report({}),))
    assert len(texts) == 1
    assert "report from the training loop" in texts[0]
    assert bench.sink.indices() == [0, 1]


def test_an_upload_that_reports_while_report_waits_for_it_ends_all_the_same(bench):
    """With a full queue each would wait for the other."""
    gate = threading.Event()

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        assert gate.wait(30)
        bench.reporter.report({"inner": 1})
        raise AssertionError("not reached")

    def work() -> str:
        for name in "abcd":
            bench.reporter.report({}, bench.checkpoint(name), UploadOptions(mode=ASYNC, upload_fn=upload))
        return "done"

    opener = threading.Thread(
        target=lambda: (wait_until(lambda: bench.reporter.num_pending == 4, "the queue is full"), gate.set())
    )
    opener.start()
    assert in_time(work) == "done"
    opener.join()
    assert bench.reporter.wait(30)
    assert bench.sink.indices() == [0, 1, 2, 3]
    with pytest.raises(UploadError, match="can neither report nor wait"):
        bench.reporter.finish()


def test_a_report_that_was_interrupted_by_an_exception_does_not_block_the_next(bench):
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    for _ in range(3):
        bench.sink.meanwhile = stop
        with pytest.raises(Stop):
            bench.reporter.report({})
    in_time(lambda: (bench.reporter.report({}),))
    assert bench.sink.indices() == [0]


def test_an_earlier_failure_is_heard_of_whatever_ends_the_report(bench, caplog):
    def fail(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise OSError("earlier")

    def stop(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise KeyboardInterrupt

    bench.reporter.report({}, bench.checkpoint("a"), UploadOptions(mode=ASYNC, upload_fn=fail))
    assert bench.reporter.wait(30)
    with pytest.raises(KeyboardInterrupt):
        bench.reporter.report({}, bench.checkpoint("b"), UploadOptions(upload_fn=stop))
    assert "OSError: earlier" in caplog.text


def test_another_thread_waits_for_its_turn_and_is_not_refused(bench):
    gate, entered = threading.Event(), threading.Event()
    bench.sink.meanwhile = lambda: (entered.set(), gate.wait(30))
    first = threading.Thread(target=lambda: bench.reporter.report({"thread": 0}))
    first.start()
    assert entered.wait(30)
    second = threading.Thread(target=lambda: bench.reporter.report({"thread": 1}))
    second.start()
    gate.set()
    first.join(30)
    second.join(30)
    assert bench.sink.indices() == [0, 1]


def at_moment(number: int, call: Callable[[], object], handler: Callable[[], object]) -> bool:
    """``call()``, with ``handler()`` before its ``number``-th bytecode, where a signal handler may run too.

    Returns:
        Whether there were as many.
    """
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left < 0


def test_a_signal_at_any_moment_neither_blocks_nor_spoils_the_numbers(tmp_path):
    """Before the lock, within, behind it: the handler's report is refused, or has a number of its own."""
    bench = Bench(tmp_path)
    refused, taken = list[str](), 0

    def report_again() -> None:
        nonlocal taken
        try:
            bench.reporter.report({"inner": 1})
            taken += 1
        except TrainError as error:
            refused.append(str(error))

    def every_moment() -> int:
        number = 0
        while at_moment(number, lambda: bench.reporter.report({"outer": 1}), report_again):
            number += 1
        return number

    num_moments = in_time(every_moment)
    assert len(refused) + taken == num_moments
    assert min(len(refused), taken) > 10
    assert all("by a signal handler" in text for text in refused)
    assert bench.sink.indices() == list(range(num_moments + 1 + taken))


def test_a_signal_at_any_moment_may_ask_for_the_notices():
    def every_moment() -> list[object]:
        notices, seen, number = Notices(), list[object](), 0
        notices.preempt(PreemptionInfo())

        def ask() -> object:
            return notices.preemption is not None and notices.wants_checkpoint(0)

        while at_moment(number, ask, lambda: seen.append(ask())):
            number += 1
        return seen

    seen = in_time(every_moment)
    assert len(seen) > 10
    assert all(seen)


SIGNAL = """
import signal
from ray_lite.train.context.records import parse_record
from ray_lite.train.context.reporter import Reporter
from ray_lite.train.errors import TrainError

class Sink:
    records = []
    def add(self, record):
        if not self.records:
            signal.raise_signal(signal.SIGUSR1)
        self.records.append(record)
    def flush(self, timeout_s):
        return True

texts = []
def handle(number, frame):
    try:
        reporter.report({"inner": 1})
    except TrainError as error:
        texts.append(str(error))

reporter = Reporter(None, Sink(), attempt=1, first_report_index=0, scratch=None)
signal.signal(signal.SIGUSR1, handle)
reporter.report({"outer": 1})
reporter.report({"outer": 2})
assert [parse_record(record).report_index for record in Sink.records] == [0, 1]
assert len(texts) == 1 and "by a signal handler" in texts[0]
"""


def test_a_real_signal_is_no_exception():
    done = subprocess.run([sys.executable, "-c", SIGNAL], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_who_is_asked_for_a_checkpoint_because_of_a_preemption_finds_it():
    notices = Notices()
    assert notices.preemption is None
    assert not notices.wants_checkpoint(0)
    notices.ask_for_checkpoint()
    assert notices.wants_checkpoint(0)
    assert not notices.has_seen_preemption
    notices.reported()
    assert not notices.wants_checkpoint(0)
    notices.preempt(PreemptionInfo(deadline_ms=1))
    assert notices.wants_checkpoint(0)
    assert notices.has_seen_preemption
    assert notices.preemption == PreemptionInfo(deadline_ms=1)
