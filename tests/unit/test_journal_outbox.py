"""A report that has returned is in the journal; the queue is bounded, ordered, and loses nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from ray_lite.train.context.journal import Journal, claim_folder, read_tail, remove_journal, sweep
from ray_lite.train.context.outbox import Outbox
from ray_lite.train.errors import TrainError
from ray_lite.train.testing.clock import ManualClock


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


def test_a_living_worker_never_looks_dead_to_a_sweep(tmp_path):
    """A long run claims its folder again for each copy it makes, while other workers start and sweep."""
    claim_folder(tmp_path / "rank_0")
    claims = threading.Thread(target=lambda: [claim_folder(tmp_path / "rank_0") for _ in range(1_000)])
    claims.start()
    owners = set()
    while claims.is_alive():
        owners.add((tmp_path / "rank_0" / "owner").read_text())
    claims.join()
    assert owners == {str(os.getpid())}
    assert [path.name for path in (tmp_path / "rank_0").iterdir()] == ["owner"]


# -- files that cannot be opened -----------------------------------------------------------------


@pytest.fixture
def broken_open(monkeypatch):
    """``broken_open(number)``: no new segment can be opened, for this reason; ``broken_open(None)`` ends it."""
    real = os.open

    def break_open(number: int | None) -> None:
        def refuse(path, *args, **kwargs):
            if number is not None and "reports_" in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)

    return break_open


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_journal_that_cannot_begin_a_file_goes_on_in_the_one_it_has(tmp_path, broken_open, number):
    journal = Journal(tmp_path / "j", max_segment_bytes=10)
    records = [b"%d" % i * 10 for i in range(6)]
    journal.append(records[0])
    broken_open(number)
    for count in (1, 2, 3):
        with pytest.raises(OSError, match=os.strerror(number)):
            journal.acknowledge(count)
        journal.append(records[count])
    users = (tmp_path / "users").open("wb", buffering=0)
    journal.append(records[4])
    assert read_tail(tmp_path / "j", after=0) == records[:5]
    assert (tmp_path / "users").read_bytes() == b""
    users.close()
    # What was acknowledged goes as soon as a file can be opened again.
    broken_open(None)
    journal.acknowledge(5)
    journal.append(records[5])
    journal.close()
    assert read_tail(tmp_path / "j", after=5) == records[5:]
    assert [path.name for path in (tmp_path / "j").glob("reports_*")] == ["reports_000000000005.jsonl"]


def test_a_closed_journal_begins_no_file(tmp_path):
    """The sender may still be at work when it is closed; the number of a closed file belongs to others."""
    journal = Journal(tmp_path / "j", max_segment_bytes=1)
    journal.append(b"a")
    journal.close()
    users = os.open(tmp_path / "users", os.O_WRONLY | os.O_CREAT)
    journal.acknowledge(1)
    journal.close()
    with pytest.raises(OSError, match="Bad file"):
        journal.append(b"b")
    os.close(users)
    assert (tmp_path / "users").read_bytes() == b""
    assert [path.name for path in (tmp_path / "j").glob("reports_*")] == ["reports_000000000000.jsonl"]


@pytest.mark.parametrize("what", ["the folder is removed", "no file can be opened"])
def test_a_journal_that_cannot_begin_a_file_costs_a_warning_not_the_run(tmp_path, caplog, broken_open, what):
    receiver = Receiver()
    outbox = Outbox(receiver, Journal(tmp_path / "j", max_segment_bytes=100))
    if what == "the folder is removed":
        shutil.rmtree(tmp_path / "j")
    else:
        broken_open(errno.EMFILE)
    for _ in range(50):
        outbox.add(b"x" * 100)
        assert outbox.flush(30)
    users = (tmp_path / "users").open("wb", buffering=0)
    outbox.add(b"last")
    assert outbox.close(30)
    assert len(receiver.records) == 51
    assert (tmp_path / "users").read_bytes() == b""
    users.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be trimmed and grows" in caplog.text


def test_a_process_that_is_out_of_files_goes_on_reporting(tmp_path):
    """With the real limit, and the real file that took over the number of the journal's."""
    script = (
        "import resource, sys\n"
        "from ray_lite.train.context.journal import Journal\n"
        "from ray_lite.train.context.outbox import Outbox\n"
        "received = []\n"
        "journal = Journal(sys.argv[1], max_segment_bytes=100)\n"
        "outbox = Outbox(lambda first, records: received.extend(records), journal)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))\n"
        "for number in range(100):\n"
        "    outbox.add(b'%d' % number * 20)\n"
        "    assert outbox.flush(30)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "users = open(sys.argv[2], 'wb', buffering=0)\n"
        "outbox.add(b'last')\n"
        "assert outbox.close(30) and len(received) == 101\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "j"), str(tmp_path / "users")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "users").read_bytes() == b""


# -- the queue -----------------------------------------------------------------------------------


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
    with pytest.raises(TrainError, match="no longer reach the controller: ConnectionError: no controller") as caught:
        outbox.add(b"b")
    assert caught.value.__cause__ is receiver.error
    assert not outbox.flush(30)
    assert read_tail(tmp_path / "j", after=0) == [b"a"]
    assert not outbox.close(30)


class BrokenJournal(Journal):
    """A journal whose tidying fails in a way that nobody has thought of."""

    def acknowledge(self, count: int) -> None:
        raise RuntimeError("nobody has thought of it")


@pytest.mark.parametrize("where", ["send", "journal", "is_temporary"])
@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, MemoryError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_the_sender_is_told_to_who_waits_and_to_who_comes(tmp_path, where, kind):
    entered, gate = threading.Event(), threading.Event()

    def send(first, records):
        entered.set()
        assert gate.wait(30)
        if where != "journal":
            raise kind("the reason")

    def is_temporary(error: BaseException) -> bool:
        if where == "is_temporary":
            raise RuntimeError("nobody has thought of it")
        return False

    journal = (BrokenJournal if where == "journal" else Journal)(tmp_path / "j")
    outbox = Outbox(send, journal, max_pending_bytes=10, is_temporary=is_temporary)
    outbox.add(b"under way")
    assert entered.wait(30)
    outbox.add(b"x" * 10)
    errors: list[BaseException] = []

    def wait_for_room() -> None:
        try:
            outbox.add(b"waits")
        except TrainError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_for_room)
    thread.start()
    gate.set()
    thread.join(30)
    assert not thread.is_alive()
    expected = f"{kind.__name__}: the reason" if where == "send" else "RuntimeError: nobody has thought of it"
    assert [expected in str(error) for error in errors] == [True]
    with pytest.raises(TrainError, match=expected):
        outbox.add(b"comes")
    assert not outbox.flush(30)
    outbox.close(30)


# -- a network that is interrupted ---------------------------------------------------------------


class UnavailableError(Exception):
    """As Ray's ActorUnavailableError: it may be over soon, and the call may have arrived or not."""


class Interrupted:
    """Takes batches once ``failures`` calls have failed; each may have arrived all the same."""

    def __init__(self, failures: list[bool]) -> None:
        self.failures, self.calls, self.records = list(failures), 0, list[bytes]()

    def __call__(self, first: int, records) -> None:
        self.calls += 1
        if not self.failures:
            self._take(first, records)
            return
        if self.failures.pop(0):
            self._take(first, records)
        raise UnavailableError("the actor is temporarily unavailable")

    def _take(self, first: int, records) -> None:
        self.records.extend(records[max(0, len(self.records) - first) :])


def is_unavailable(error: BaseException) -> bool:
    return isinstance(error, UnavailableError)


@given(failures=st.lists(st.booleans(), max_size=33))
@settings(max_examples=30)
def test_what_is_temporary_is_tried_again_for_a_minute_and_nothing_arrives_twice(tmp_path_factory, failures):
    """0.1, 0.2 ... 1.6, then 2 s: the last of 34 tries is made after 59.1 s."""
    clock, receiver = ManualClock(), Interrupted(failures)
    journal = Journal(tmp_path_factory.mktemp("journal"))
    outbox = Outbox(receiver, journal, is_temporary=is_unavailable, clock=clock.now, sleep=clock.sleep)
    outbox.add(b"a")
    assert outbox.flush(30)
    outbox.add(b"b")
    assert outbox.close(30)
    assert receiver.records == [b"a", b"b"]
    pauses = [0.1, 0.2, 0.4, 0.8, 1.6, *[2.0] * 28]
    assert clock.slept_s == pytest.approx(pauses[: len(failures)])


def test_after_a_minute_it_is_no_longer_temporary(tmp_path, caplog):
    clock, receiver = ManualClock(), Interrupted([False] * 1_000)
    outbox = Outbox(receiver, Journal(tmp_path / "j"), is_temporary=is_unavailable, clock=clock.now, sleep=clock.sleep)
    outbox.add(b"a")
    outbox._thread.join(30)
    assert 58 < sum(clock.slept_s) <= 60
    with pytest.raises(TrainError, match="no longer reach the controller: UnavailableError: the actor is temporarily"):
        outbox.add(b"b")
    assert not outbox.close(30)
    assert caplog.text.count("do not reach the controller for now") == 1


def test_the_minute_begins_anew_with_each_interruption(tmp_path):
    clock, receiver = ManualClock(), Interrupted([])
    outbox = Outbox(receiver, Journal(tmp_path / "j"), is_temporary=is_unavailable, clock=clock.now, sleep=clock.sleep)
    for number in range(5):
        receiver.failures = [False] * 30
        outbox.add(b"%d" % number)
        assert outbox.flush(30)
    assert outbox.close(30)
    assert sum(clock.slept_s) > 200
    assert receiver.records == [b"%d" % number for number in range(5)]


def test_what_is_not_temporary_is_not_tried_again(tmp_path):
    receiver = Interrupted([False])
    outbox = Outbox(receiver, Journal(tmp_path / "j"))
    outbox.add(b"a")
    outbox._thread.join(30)
    assert receiver.calls == 1
    with pytest.raises(TrainError, match="UnavailableError"):
        outbox.check()
    assert not outbox.close(30)


# -- the end -------------------------------------------------------------------------------------


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
