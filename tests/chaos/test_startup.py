"""A worker that dies while it starts costs a start-up, never the run, and nothing waits for ever."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
from startup import STEPS, FragileConfig, FragileFunction

from ray_lite import train
from ray_lite.train import FailureConfig, WorkerGroupError
from ray_lite.train.torch import TorchTrainer


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_killed_in_a_step_of_the_start_is_replaced(fit, scratch, step):
    result = fit(
        FragileFunction(str(scratch), step),
        fc=FailureConfig(max_failures=0),
        trainer_options={"backend_config": FragileConfig(scratch=str(scratch), step=step, victim=1)},
        worker_runtime_env={"env_vars": {"DIES_ON_IMPORT": str(scratch)}} if step == "import" else None,
    )
    assert result.metrics == {"attempt": 2, "size": 2}


def test_a_start_that_always_fails_ends_with_the_step_in_the_error(fit):
    class Broken:
        def __reduce__(self):
            return os._exit, (1,)

    broken = Broken()
    with pytest.raises(WorkerGroupError, match="setting up the workers"):
        fit(lambda: broken, n=1, fc=FailureConfig(max_failures=5))


def kill_while_starting(fit, rng: random.Random, count: int, window_s: float, **options) -> int:
    """Kill a worker at a random moment of its start, ``count`` times; every run ends well."""
    from ray._private.state import actors

    killed = 0
    for _ in range(count):
        stop = threading.Event()
        wait_s, first = rng.uniform(0.0, window_s), rng.random()

        def kill(stop=stop, wait_s=wait_s, first=first) -> None:
            nonlocal killed
            began = time.monotonic()
            while not stop.wait(0.01):
                pids = sorted(
                    info["Pid"]
                    for info in actors().values()
                    if info["ActorClassName"] == "Worker" and info["State"] == "ALIVE" and info["Pid"]
                )
                if pids and time.monotonic() - began >= wait_s:
                    os.kill(pids[int(first * len(pids))], signal.SIGKILL)
                    killed += 1
                    return

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            result = fit(train_shortly, fc=FailureConfig(max_failures=1), **options)
        finally:
            stop.set()
            thread.join()
        assert result.metrics == {"size": 2}
    return killed


def train_shortly() -> None:
    pause = threading.Event()
    pause.wait(0.3)
    train.report({"size": train.get_context().get_world_size()})


def test_workers_killed_at_a_random_moment_of_the_start_are_replaced(fit):
    assert kill_while_starting(fit, random.Random(8), 2, 1.0) >= 1


@pytest.mark.proof
def test_workers_killed_at_20_random_moments_of_the_start_are_replaced(fit):
    assert kill_while_starting(fit, random.Random(9), 14, 1.0) >= 10
    # With a process group: rendezvous, connecting of the pairs, training.
    assert kill_while_starting(fit, random.Random(10), 6, 3.0, trainer=TorchTrainer) >= 4
