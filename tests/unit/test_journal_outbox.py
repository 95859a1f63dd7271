"""A report that has returned is in the journal; the queue is bounded, ordered, and loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from ray_lite.train.context.journal import Journal, read_tail, remove_journal, sweep
from ray_lite.train.context.outbox import Outbox
from ray_lite.train.errors import TrainError


@given(
    sizes=st.lists(st.integers(0, 60), max_size=60),
    acknowledgements=st.lists(st.integers(0, 60), max_size=10),
    after=st.integers(0, 70),
    segment=st.integers(1, 200),
)
@settings(max_examples=60)
def test_the_tail_is_what_was_not_acknowledged(tmp_path_factory, sizes, acknowledgements, after, segment):
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, max_segment_bytes=segment)
    records = [b"%d:" % number + b"x" * size for number, size in enumerate(sizes)]
    acknowledged = 0
    for number, record in enumerate(records):
        journal.append(record)
        for upto in acknowledgements:
            if acknowledged <= upto <= number:
                acknowledged = upto
                journal.acknowledge(upto)
    journal.close()
    after = max(after, acknowledged)
    assert read_tail(folder, after=after) == records[after:]


def test_acknowledged_segments_go_so_a_long_run_stays_small(tmp_path):
    journal = Journal(tmp_path / "j", max_segment_bytes=1_000)
    for number in range(10_000):
        journal.append(b"x" * 100)
        journal.acknowledge(number)
    journal.close()
    assert sum(path.stat().st_size for path in (tmp_path / "j").iterdir()) < 3_100


def test_a_torn_last_line_is_left_out(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append(b"whole")
    os.write(journal._fd, b"to")
    journal.close()
    assert read_tail(tmp_path / "j", after=0) == [b"whole"]


def test_a_missing_journal_has_no_tail(tmp_path):
    assert read_tail(tmp_path / "nothing", after=0) == []
    remove_journal(tmp_path / "nothing")


def test_records_survive_kill_9_of_the_writer(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from ray_lite.train.context.journal import Journal\n"
        "journal = Journal(sys.argv[1])\n"
        "for number in range(500): journal.append(b'%d' % number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "j")], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_tail(tmp_path / "j", after=0) == [b"%d" % number for number in range(500)]


def test_what_a_killed_run_left_is_swept_and_a_living_one_is_not(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for run in ("living", "dead", "young"):
        Journal(tmp_path / run / "attempt_1" / "rank_0").close()
    for run in ("dead", "young"):
        (tmp_path / run / "attempt_1" / "rank_0" / "owner").write_text(ended.stdout)
    for run in ("living", "dead"):
        os.utime(tmp_path / run / "attempt_1" / "rank_0", (1, 1))
    assert [path.name for path in sweep(tmp_path, min_age_s=60)] == ["dead"]
    assert sweep(tmp_path / "nothing") == []


class Receiver:
    """Takes batches; can be held up, and told to fail."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.batches = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def __call__(self, first: int, records) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        assert first == len(self.records)
        self.records.extend(records)
        self.batches += 1


def test_threads_that_report_at_once_lose_nothing_and_tear_nothing(tmp_path):
    receiver = Receiver()
    outbox = Outbox(receiver, Journal(tmp_path / "j"))

    def work(name: int) -> None:
        for number in range(500):
            outbox.add(b"%d-%d" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outbox.close(30)
    assert sorted(receiver.records) == sorted(b"%d-%d" % (name, n) for name in range(4) for n in range(500))
    for name in range(4):
        own = [record for record in receiver.records if record.startswith(b"%d-" % name)]
        assert own == [b"%d-%d" % (name, n) for n in range(500)]


def test_what_waits_for_a_slow_receiver_leaves_in_one_batch(tmp_path):
    receiver = Receiver()
    receiver.gate.clear()
    outbox = Outbox(receiver, Journal(tmp_path / "j"))
    outbox.add(b"first")
    assert receiver.entered.wait(30)
    for number in range(100):
        outbox.add(b"%d" % number)
    receiver.gate.set()
    assert outbox.close(30)
    assert receiver.batches == 2


def test_a_slow_receiver_slows_the_reporter_and_memory_stays_bounded(tmp_path):
    receiver = Receiver()
    receiver.gate.clear()
    outbox = Outbox(receiver, Journal(tmp_path / "j"), max_pending_bytes=1_000)
    outbox.add(b"first")
    assert receiver.entered.wait(30)
    added = threading.Event()

    def work() -> None:
        for _ in range(30):
            outbox.add(b"x" * 100)
        added.set()

    thread = threading.Thread(target=work)
    thread.start()
    # It can go on only until 1,000 bytes wait: ten records behind the one under way.
    wait_until(lambda: outbox._pending_bytes >= 1_000, "the queue is full")
    assert not added.is_set()
    assert outbox.num_added <= 12
    receiver.gate.set()
    assert added.wait(30)
    thread.join()
    assert outbox.close(30)
    assert len(receiver.records) == 31


def test_flush_waits_for_arrival_and_says_when_it_did_not_happen(tmp_path):
    receiver = Receiver()
    receiver.gate.clear()
    outbox = Outbox(receiver, Journal(tmp_path / "j"))
    outbox.add(b"a")
    assert not outbox.flush(0.0)
    receiver.gate.set()
    assert outbox.flush(30)
    assert receiver.records == [b"a"]
    assert outbox.close(30)


def test_a_controller_that_is_gone_is_told_to_the_next_report(tmp_path):
    receiver = Receiver()
    receiver.error = ConnectionError("no controller")
    outbox = Outbox(receiver, Journal(tmp_path / "j"))
    outbox.add(b"a")
    outbox._thread.join(30)
    with pytest.raises(TrainError, match="controller of this run is gone"):
        outbox.add(b"b")
    assert not outbox.flush(30)
    assert read_tail(tmp_path / "j", after=0) == [b"a"]


def test_a_thread_that_outlives_the_train_function_is_refused(tmp_path):
    outbox = Outbox(Receiver(), Journal(tmp_path / "j"))
    assert outbox.close(30)
    with pytest.raises(TrainError, match="train function has ended"):
        outbox.add(b"late")


def test_a_full_temporary_disk_costs_a_warning_not_the_run(tmp_path, caplog):
    receiver = Receiver()
    journal = Journal(tmp_path / "j")
    os.close(journal._fd)
    journal._fd = os.open("/dev/full", os.O_WRONLY)
    outbox = Outbox(receiver, journal)
    outbox.add(b"a")
    outbox.add(b"b")
    assert outbox.close(30)
    assert receiver.records == [b"a", b"b"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
