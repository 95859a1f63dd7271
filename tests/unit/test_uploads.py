"""Uploads behind the scenes: in order, bounded, and no failure goes unheard."""

from __future__ import annotations

import threading

import pytest
from waiting import wait_until

from ray_lite.train.context.uploads import UploadQueue
from ray_lite.train.errors import TrainError, UploadError


def test_jobs_run_in_order_and_the_thread_ends_with_them():
    queue, done = UploadQueue(), []
    for number in range(20):
        queue.add(lambda number=number: done.append(number))
    assert queue.close()
    assert done == list(range(20))
    assert not [thread for thread in threading.enumerate() if thread.name == "ray_lite-uploads"]


def test_a_third_waiting_job_makes_its_caller_wait():
    queue, gate = UploadQueue(max_waiting=2), threading.Event()
    started = threading.Event()

    def first():
        started.set()
        gate.wait(30)

    queue.add(first)
    assert started.wait(30)
    queue.add(lambda: None)
    queue.add(lambda: None)
    assert queue.num_pending == 3
    returned = threading.Event()
    caller = threading.Thread(target=lambda: (queue.add(lambda: None), returned.set()))
    caller.start()
    wait_until(lambda: queue.num_pending == 4, "the fourth job is queued")
    assert not returned.is_set()
    gate.set()
    assert returned.wait(30)
    caller.join()
    assert queue.close()
    assert queue.num_pending == 0


def test_a_failure_waits_to_be_taken_once_and_the_next_job_runs():
    queue, done = UploadQueue(), []

    def fail():
        raise OSError("no")

    queue.add(fail)
    queue.add(lambda: done.append(1))
    assert queue.wait(30)
    assert [str(error) for error in queue.take_failures()] == ["no"]
    assert queue.take_failures() == []
    assert done == [1]
    queue.close()


class MuteError(Exception):
    """Fails to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit("x"), MemoryError(), MuteError()])
def test_a_job_has_ended_whatever_it_raised(error):
    queue, done = UploadQueue(), []

    def fail():
        raise error

    queue.add(fail)
    queue.add(lambda: done.append(1))
    assert queue.wait(30)
    assert done == [1]
    (failure,) = queue.take_failures()
    if isinstance(error, Exception):
        assert failure is error
    else:
        assert isinstance(failure, UploadError)
        assert type(error).__name__ in str(failure)
        assert failure.__cause__ is error
    assert queue.num_pending == 0
    assert queue.close(30)


def test_where_no_thread_can_be_started_the_caller_does_the_work(monkeypatch, caplog):
    """The queue would be waited for for ever; a process at its limit of threads is slow, not stuck."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    queue, done = UploadQueue(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for number in range(5):
            queue.add(lambda number=number: done.append(number))
            assert done == list(range(number + 1))
    assert "can't start new thread" in caplog.text
    queue.add(lambda: done.append(5))
    assert queue.close(30)
    assert done == list(range(6))


@pytest.mark.parametrize("call", ["wait", "add"])
def test_a_job_that_would_wait_for_itself_is_refused(call):
    queue = UploadQueue(max_waiting=0)
    queue.add(lambda: queue.wait() if call == "wait" else queue.add(lambda: None))
    assert queue.close(30)
    (failure,) = queue.take_failures()
    assert isinstance(failure, TrainError)
    assert "return from it, and report from the training loop" in str(failure)


def test_closing_in_a_hurry_drops_what_has_not_begun():
    queue, gate, done = UploadQueue(), threading.Event(), []
    queue.add(lambda: gate.wait(30))
    queue.add(lambda: done.append(1))
    assert not queue.close(0.01)
    gate.set()
    assert queue.wait(30)
    assert done == []
    with pytest.raises(TrainError, match="has ended"):
        queue.add(lambda: None)
