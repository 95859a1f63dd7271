"""Restarts in place and from standbys, hangs with their stacks, preemption, elastic groups, a dead controller."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from helpers import first_time, folder_with, note, notes, rank, read
from waiting import wait_until

from ray_lite import train
from ray_lite.train import FailureConfig, HangError, ScalingConfig, WorkerGroupError
from ray_lite.train.torch import TorchTrainer


def all_reduce() -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor([1])
    dist.all_reduce(total)
    return int(total)


def test_in_place_the_same_processes_train_on_with_a_new_group(fit, scratch):
    def fn(config):
        note(config["scratch"], f"pids-{rank()}", os.getpid())
        assert all_reduce() == 2
        if rank() == 1 and first_time(config["scratch"], "raise"):
            raise ValueError("once")
        assert all_reduce() == 2
        train.report({"attempt": train.get_context().get_attempt()})

    result = fit(
        fn,
        cfg={"scratch": str(scratch)},
        fc=FailureConfig(max_failures=1, restart="in_place"),
        trainer=TorchTrainer,
    )
    assert result.metrics == {"attempt": 2}
    for r in range(2):
        first, second = notes(scratch, f"pids-{r}")
        assert first == second


def test_in_place_a_dead_worker_is_replaced_and_the_living_one_stays(fit, scratch):
    def fn(config):
        note(config["scratch"], f"pids-{rank()}", os.getpid())
        assert all_reduce() == 2
        if rank() == 1 and first_time(config["scratch"], "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        assert all_reduce() == 2
        train.report({"ok": True})

    fc = FailureConfig(max_failures=1, restart="in_place", standby_workers=1)
    assert fit(fn, cfg={"scratch": str(scratch)}, fc=fc, trainer=TorchTrainer).metrics == {"ok": True}
    assert len(set(notes(scratch, "pids-0"))) == 1
    assert len(set(notes(scratch, "pids-1"))) == 2


def test_in_place_a_rank_that_does_not_come_to_rest_is_replaced(fit, scratch):
    def fn(config):
        note(config["scratch"], f"pids-{rank()}", os.getpid())
        if train.get_context().get_attempt() == 1:
            if rank() == 1:
                raise ValueError("once")
            signal.pause()

    fit(fn, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=1, restart="in_place"))
    assert len(set(notes(scratch, "pids-0"))) == 2
    assert len(set(notes(scratch, "pids-1"))) == 1


def test_standbys_take_the_places_of_lost_workers(fit, scratch):
    def fn(config):
        note(config["scratch"], "pids", os.getpid())
        if rank() == 0 and train.get_context().get_attempt() < 3:
            os.kill(os.getpid(), signal.SIGKILL)

    fit(fn, n=1, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=2, standby_workers=1))
    assert len(set(notes(scratch, "pids"))) == 3


@pytest.mark.parametrize("how", ["sleep", "stop", "loop"])
def test_a_hang_names_the_rank_and_its_line(fit, how):
    def hangs_here(how):
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "loop":
            import re

            # One call into C that holds the GIL for hours.
            re.match(r"(a+)+$", "a" * 40 + "b")
        signal.pause()

    def fn(config):
        train.report({"i": 0})
        if rank() == 1:
            hangs_here(config["how"])
        signal.pause()

    with pytest.raises(WorkerGroupError, match="nothing has moved") as caught:
        fit(fn, cfg={"how": how}, fc=FailureConfig(hang_timeout_s=2))
    assert isinstance(caught.value.__cause__, HangError)
    text = str(caught.value)
    assert "rank 0" in text
    assert "rank 1" in text
    if how == "stop":
        assert "rank 1" in text.splitlines()[0]
        assert "stopped" in text
    else:
        assert "hangs_here" in text


def test_a_rank_that_moves_is_no_hang(fit):
    def fn():
        context = train.get_context()
        event = threading.Event()
        for _ in range(30):
            context.heartbeat()
            event.wait(0.1)

    fit(fn, fc=FailureConfig(hang_timeout_s=1))


def test_sigterm_to_a_worker_becomes_a_request_to_checkpoint_and_costs_no_failure(fit, scratch):
    def fn(config):
        checkpoint = train.get_checkpoint()
        start = 0 if checkpoint is None else int(read(checkpoint, "i")) + 1
        context = train.get_context()
        note(config["scratch"], f"starts-{rank()}", start)
        if start == 0:
            train.report({"i": 0})
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            wait_until(context.should_checkpoint, "the notice has come")
            info = context.get_preemption_info()
            assert info.preempted_ranks == [1]
            assert 0 < info.seconds_left() <= 30
            with folder_with(i="1") as new:
                train.report({"i": 1}, checkpoint=new)
            assert not context.should_checkpoint()
            return
        train.report({"i": start})

    result = fit(fn, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=0))
    assert result.metrics == {"i": 2}
    assert notes(scratch, "starts-0") == [0, 2]
    assert notes(scratch, "starts-1") == [0, 2]


def test_a_preempted_function_that_does_not_listen_is_ended_when_the_time_is_up(fit, scratch):
    def fn(config):
        if first_time(config["scratch"], f"wait-{rank()}"):
            if rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            while True:
                threading.Event().wait(1)
        train.report({"attempt": train.get_context().get_attempt()})

    fc = FailureConfig(max_failures=0, preemption_grace_s=2)
    assert fit(fn, cfg={"scratch": str(scratch)}, fc=fc).metrics == {"attempt": 2}


def test_ranks_that_know_nothing_of_each_other_save_the_same_step_when_preempted(fit, scratch):
    def fn(config):
        context = train.get_context()
        if context.get_attempt() == 2:
            note(config["scratch"], "found", train.get_checkpoint().files())
            return
        pause = threading.Event()
        for i in range(100_000):
            pause.wait(0.01)
            if i == 30 and rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if context.should_checkpoint():
                with folder_with(**{f"part-{rank()}": str(i)}) as new:
                    train.report({"i": i}, checkpoint=new)
                return
            train.report({"i": i})

    fit(fn, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=0))
    assert notes(scratch, "found") == [["part-0", "part-1"]] * 2


def test_preemptions_have_a_budget_of_their_own(fit):
    def fn():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: train.get_context().get_preemption_info(), "the notice has come")

    with pytest.raises(train.PreemptionError):
        fit(fn, n=1, fc=FailureConfig(max_failures=5, max_preemption_failures=1))


def test_an_elastic_group_starts_with_what_fits(fit):
    def fn():
        train.report({"size": train.get_context().get_world_size()})

    result = fit(fn, scaling=ScalingConfig(num_workers=(1, 16)))
    assert result.metrics == {"size": 4}


def test_an_elastic_group_grows_at_a_checkpoint_when_room_appears(fit, scratch):
    import ray

    @ray.remote(num_cpus=2)
    class Occupier:
        def ping(self):
            return True

    occupier = Occupier.remote()
    ray.get(occupier.ping.remote())

    def fn(config):
        context = train.get_context()
        checkpoint = train.get_checkpoint()
        start = 0 if checkpoint is None else int(read(checkpoint, "i")) + 1
        note(config["scratch"], "starts", [context.get_world_size(), start])
        if context.get_world_size() == 4:
            train.report({"size": 4, "start": start})
            return
        note(config["scratch"], "running", 1)
        wait_until(context.should_checkpoint, "a checkpoint is asked for", 60)
        with folder_with(i="5") as new:
            train.report({"size": context.get_world_size()}, checkpoint=new if rank() == 0 else None)
        signal.pause()

    def free_the_room():
        wait_until(lambda: len(notes(scratch, "running")) == 2, "two workers run", 60)
        ray.kill(occupier)

    thread = threading.Thread(target=free_the_room)
    thread.start()
    result = fit(
        fn,
        cfg={"scratch": str(scratch)},
        scaling=ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=0.5),
    )
    thread.join()
    assert result.metrics == {"size": 4, "start": 6}


def test_a_controller_that_dies_is_started_anew_and_resumes(fit, scratch):
    def fn(config):
        checkpoint = train.get_checkpoint()
        start = 0 if checkpoint is None else int(read(checkpoint, "i")) + 1
        for i in range(start, 3):
            with folder_with(i=str(i)) as new:
                train.report({"i": i, "start": start}, checkpoint=new)
            if i == 1 and first_time(config["scratch"], "kill"):
                wait_until(lambda: os.path.exists(f"{train.get_checkpoint().path}/.ray_lite.json"), "a commit")
                note(config["scratch"], "ready", 1)
                signal.pause()

    thread = threading.Thread(target=kill_the_controller_when, args=(lambda: notes(scratch, "ready"),))
    thread.start()
    result = fit(fn, n=1, cfg={"scratch": str(scratch)})
    thread.join()
    assert result.metrics == {"i": 2, "start": 2}


def kill_the_controller_when(condition) -> None:
    from ray._private.state import actors

    wait_until(condition, "its moment has come", 60)
    (pid,) = [
        info["Pid"] for info in actors().values() if info["State"] == "ALIVE" and info["ActorClassName"] == "Controller"
    ]
    os.kill(pid, signal.SIGKILL)


def test_failures_are_counted_on_when_the_controller_dies(fit, scratch):
    def fn(config):
        attempt = train.get_context().get_attempt()
        note(config["scratch"], "attempts", attempt)
        if attempt == 2:
            signal.pause()
        raise ValueError(f"attempt {attempt}")

    attempts = lambda: notes(scratch, "attempts")  # noqa: E731
    thread = threading.Thread(target=kill_the_controller_when, args=(lambda: attempts() == [1, 2],))
    thread.start()
    with pytest.raises(WorkerGroupError, match=r"failure 2 \(max_failures=1\)"):
        fit(fn, n=1, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=1))
    thread.join()
    assert attempts() == [1, 2, 3]


@pytest.mark.parametrize("how", ["exit", "raise", "return"])
def test_a_forked_child_that_leaves_the_train_function_ends_there(fit, scratch, how):
    def fn(config):
        pid = os.fork()
        if pid == 0:
            note(config["scratch"], "child", os.getpid())
            if how == "exit":
                raise SystemExit(3)
            if how == "raise":
                raise ValueError("in the child")
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        train.report({"code": code})

    result = fit(fn, n=1, cfg={"scratch": str(scratch)})
    assert result.metrics == {"code": {"exit": 3, "raise": 1, "return": 0}[how]}
    assert len(notes(scratch, "child")) == 1


def test_of_a_rank_in_a_collective_and_one_elsewhere_the_latter_hangs(fit):
    def sleeps_here():
        signal.pause()

    def fn():
        assert all_reduce() == 2
        if rank() == 1:
            # It has moved last, and yet it is the one that the other waits for.
            until = time.monotonic() + 1.5
            wait_until(lambda: train.get_context().heartbeat() or time.monotonic() > until, "a while", 10)
            sleeps_here()
        all_reduce()

    with pytest.raises(WorkerGroupError, match=r"rank 1 on .* hangs") as caught:
        fit(fn, trainer=TorchTrainer, fc=FailureConfig(hang_timeout_s=3))
    text = str(caught.value)
    assert list(caught.value.worker_failures) == [1]
    assert "in sleeps_here" in text
    assert "all_reduce" in text


def test_an_error_of_a_rank_that_stays_is_a_failure_also_while_others_are_preempted(fit):
    def fn():
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        wait_until(train.get_context().get_preemption_info, "the notice has come")
        if rank() == 1:
            raise ValueError("its own")
        signal.pause()

    with pytest.raises(WorkerGroupError, match=r"failure 1 \(max_failures=0\)") as caught:
        fit(fn, fc=FailureConfig(max_failures=0))
    assert isinstance(caught.value.__cause__, ValueError)


def test_relaxed_collectives_do_not_wait_for_ranks_that_are_taken_away(fit):
    def fn():
        context = train.get_context()
        if context.get_attempt() == 2:
            train.report({"attempt": 2})
            return
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        wait_until(context.get_preemption_info, "the notice has come")
        train.collective.barrier(timeout_s=20)

    fc = FailureConfig(max_failures=0, relax_collectives_on_preemption=True, preemption_grace_s=3)
    assert fit(fn, fc=fc).metrics == {"attempt": 2}


def test_fit_works_from_a_thread_an_actor_and_under_a_running_event_loop(fit, tmp_path):
    import asyncio

    import ray

    results = []
    thread = threading.Thread(target=lambda: results.append(fit(lambda: train.report({"a": 1}), n=1)))
    thread.start()
    thread.join()
    assert results[0].metrics == {"a": 1}

    async def main():
        return fit(lambda: train.report({"a": 2}), n=1)

    assert asyncio.run(main()).metrics == {"a": 2}

    @ray.remote(num_cpus=1)
    def inside(path):
        trainer = train.DataParallelTrainer(
            lambda: train.report({"a": 3}),
            scaling_config=ScalingConfig(num_workers=1),
            run_config=train.RunConfig(storage_path=path),
        )
        return trainer.fit().metrics

    assert ray.get(inside.remote(str(tmp_path / "inside"))) == {"a": 3}
