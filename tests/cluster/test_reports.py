"""Reports of several ranks: none is a barrier, none is lost, none can hang the run."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import first_time, folder_with, note, notes, rank, read
from waiting import wait_until

from ray_lite import train
from ray_lite.train import Callback, FailureConfig, NotInTrainFunctionError, WorkerGroupError


def test_metrics_are_rank_0s_and_the_history_has_every_report(fit):
    def fn():
        for i in range(5):
            train.report({"i": i, "rank": rank()})

    result = fit(fn)
    assert result.metrics == {"i": 4, "rank": 0}
    assert result.metrics_history == [{"i": i, "rank": 0} for i in range(5)]
    assert result.checkpoint is None
    assert result.error is None


def test_ranks_may_report_a_different_number_of_times(fit):
    def fn():
        for i in range(3 + 2 * rank()):
            with folder_with(**{f"part-{rank()}": str(i)}) as checkpoint:
                train.report({"i": i}, checkpoint=checkpoint)

    result = fit(fn)
    assert result.metrics["i"] == 2
    # Rank 1 made reports 3 and 4 alone; they are complete once rank 0 has finished.
    assert [sorted(c.files()) for c, _ in result.best_checkpoints] == [["part-0", "part-1"]] * 3 + [["part-1"]] * 2


def test_rank_0_alone_may_report(fit):
    def fn():
        if rank() == 0:
            for i in range(3):
                with folder_with(w=str(i)) as checkpoint:
                    train.report({"i": i}, checkpoint=checkpoint)

    result = fit(fn)
    assert result.metrics == {"i": 2}
    assert read(result.checkpoint, "w") == "2"


def test_a_rank_may_return_while_the_others_go_on(fit):
    def fn():
        if rank() == 1:
            return
        for i in range(4):
            with folder_with(w=str(i)) as checkpoint:
                train.report({"i": i}, checkpoint=checkpoint)

    assert len(fit(fn).best_checkpoints) == 4


def test_a_checkpoint_of_a_rank_other_than_0_keeps_rank_0s_metrics(fit):
    def fn():
        if rank() == 1:
            with folder_with(w="1") as checkpoint:
                train.report({"loss": 9}, checkpoint=checkpoint)
        else:
            train.report({"loss": 1})

    result = fit(fn)
    assert read(result.checkpoint, "w") == "1"
    assert result.metrics["loss"] == 1
    assert result.best_checkpoints[0][1] == {"loss": 1}


def test_report_returns_without_waiting_for_the_other_ranks(fit, scratch):
    def fn(config):
        if rank() == 0:
            for i in range(100):
                train.report({"i": i})
            note(config["scratch"], "rank0", "done")
        else:
            wait_until(lambda: notes(config["scratch"], "rank0"), "rank 0 has made all its reports alone")
            train.report({"i": 0})

    assert fit(fn, cfg={"scratch": str(scratch)}).metrics["i"] == 99


def test_threads_pools_and_asyncio_report_like_the_train_function(fit):
    def fn():
        worker = threading.Thread(target=lambda: train.report({"i": 1, "r": train.get_context().get_world_rank()}))
        worker.start()
        worker.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: train.report({"i": 2, "r": rank()})).result()

        async def report() -> None:
            train.report({"i": 3, "r": rank()})

        asyncio.run(report())

    result = fit(fn)
    assert [row["i"] for row in result.metrics_history] == [1, 2, 3]
    assert {row["r"] for row in result.metrics_history} == {0}


def test_two_threads_that_report_at_once_lose_and_tear_no_row(fit):
    def fn():
        def work(name: str) -> None:
            for i in range(300):
                train.report({"name": name, "i": i})

        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    rows = fit(fn, n=1).metrics_history
    for name in "ab":
        assert [row["i"] for row in rows if row["name"] == name] == list(range(300))


def test_the_train_function_runs_in_the_main_thread(fit):
    def fn():
        assert threading.current_thread() is threading.main_thread()
        old = signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.signal(signal.SIGUSR1, old)
        train.report({"ok": True})

    assert fit(fn).metrics == {"ok": True}


def test_reports_that_have_returned_survive_kill_9(fit, scratch):
    def fn(config):
        if first_time(config["scratch"], "kill"):
            for i in range(2_000):
                train.report({"i": i})
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerGroupError) as caught:
        fit(fn, n=1, cfg={"scratch": str(scratch)})
    assert [row["i"] for row in caught.value.result.metrics_history] == list(range(2_000))


def test_a_checkpoint_whose_report_has_returned_survives_kill_9(fit, scratch):
    def fn(config):
        with folder_with(w="saved") as checkpoint:
            train.report({"i": 0}, checkpoint=checkpoint)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerGroupError) as caught:
        fit(fn, n=1, cfg={"scratch": str(scratch)})
    assert read(caught.value.result.checkpoint, "w") == "saved"


def test_outside_a_train_function_each_call_says_where_it_belongs(cluster):
    calls = {
        "train.report()": lambda: train.report({}),
        "train.get_context()": train.get_context,
        "train.get_checkpoint()": train.get_checkpoint,
        "train.get_dataset_shard()": lambda: train.get_dataset_shard("x"),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        assert isinstance(caught.value, NotInTrainFunctionError)
        assert name in str(caught.value)
        assert "inside a train function" in str(caught.value)


def test_a_ray_task_and_a_forked_child_of_a_train_function_get_the_same_clear_error(fit):
    def fn():
        import ray

        with pytest.raises(RuntimeError, match=r"train\.get_context\(\) works only inside a train function"):
            ray.get(ray.remote(num_cpus=0)(lambda: train.get_context()).remote())

        def child(queue) -> None:
            try:
                train.report({"from": "child"})
            except NotInTrainFunctionError as error:
                queue.put(str(error))

        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        text = queue.get(timeout=30)
        process.join()
        train.report({"text": text})

    assert "child process of a worker" in fit(fn, n=1).metrics["text"]


def test_after_fit_nothing_is_left_of_the_context(fit):
    fit(lambda: train.report({"a": 1}), n=0)
    with pytest.raises(NotInTrainFunctionError):
        train.get_context()


def test_a_function_that_never_reports_is_a_quiet_success(fit, capfd):
    result = fit(lambda: None)
    assert result.metrics is None
    assert result.checkpoint is None
    assert result.error is None
    assert result.best_checkpoints == []
    assert result.get_best_checkpoint("a", "max") is None
    assert result.metrics_dataframe is None
    assert "Result(" in repr(result)
    assert "ray_lite" not in capfd.readouterr().err


def test_metrics_without_a_checkpoint_are_in_the_result(fit):
    result = fit(lambda: train.report({"a": 1}))
    assert result.checkpoint is None
    assert result.metrics == {"a": 1}
    assert train.Result.from_path(result.path).metrics == {"a": 1}


def test_metrics_that_appear_late_become_columns(fit):
    def fn():
        for i in range(6):
            train.report({"i": i, "val": i} if i % 3 == 2 else {"i": i})

    result = fit(fn, n=1)
    frame = result.metrics_dataframe
    assert list(frame["i"]) == list(range(6))
    assert frame["val"].notna().sum() == 2
    assert result.metrics["val"] == 5


class Watcher(Callback):
    def __init__(self) -> None:
        self.seen: list = []

    def on_run_start(self, run_context):
        self.seen.append(("start", run_context.path))

    def after_report(self, run_context, metrics, checkpoint):
        self.seen.append(("report", [dict(m) for m in metrics], checkpoint))

    def after_checkpoint(self, run_context, checkpoint, metrics):
        self.seen.append(("checkpoint", checkpoint.path, dict(metrics)))

    def after_exception(self, run_context, worker_exceptions):
        self.seen.append(("exception", {rank: type(e) for rank, e in worker_exceptions.items()}))

    def on_restart(self, run_context, attempt, reason):
        self.seen.append(("restart", attempt))

    def on_run_end(self, run_context, result):
        self.seen.append(("end", result.error))


def test_callbacks_see_all_ranks_on_the_very_object_that_was_passed(fit, scratch):
    def fn(config):
        for i in range(3):
            with folder_with(w=str(i)) as checkpoint:
                train.report({"i": i, "rank": rank()}, checkpoint=checkpoint if i == 1 else None)
        # A report is no barrier: without this the other rank may be ended before it has made its own.
        train.collective.barrier()
        if first_time(config["scratch"], "raise"):
            raise ValueError("once")

    watcher = Watcher()
    fit(fn, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=1), callbacks=[watcher])
    kinds = [entry[0] for entry in watcher.seen]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("restart") == 1
    assert kinds.count("checkpoint") == 2
    assert ("exception", dict.fromkeys(watcher.seen[kinds.index("exception")][1], ValueError)) in watcher.seen
    last = [entry for entry in watcher.seen if entry[0] == "report"][-1]
    assert last[1] == [{"i": 2, "rank": 0}, {"i": 2, "rank": 1}]


class Broken(Callback):
    def after_report(self, run_context, metrics, checkpoint):
        raise ZeroDivisionError("in the callback")


def test_an_error_in_a_callback_is_logged_and_the_training_goes_on(fit, caplog):
    result = fit(lambda: train.report({"a": 1}), callbacks=[Broken()])
    assert result.metrics == {"a": 1}
    assert "Broken.after_report failed" in caplog.text
