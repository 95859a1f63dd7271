"""A process that fits again and again, and is interrupted each time: the script of ``test_interrupts.py``.

Prints one JSON line per round: before it, and after it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from clusters import living_actors, placement_groups
from helpers import folder_with
from processes import processes_of
from waiting import wait_until

from ray_lite import train
from ray_lite.train import CheckpointConfig, RunConfig, ScalingConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train_a_second(config: dict[str, Any]) -> None:
    """Twenty steps, five checkpoints of 2 MB."""
    pause = threading.Event()
    for i in range(20):
        pause.wait(0.03)
        if i % 4 == 3:
            with folder_with(weights=b"w" * 2_000_000) as new:
                train.report({"i": i}, checkpoint=new if train.get_context().get_world_rank() == 0 else None)
        else:
            train.report({"i": i})


def fit(storage_path: str, name: str) -> train.Result:
    return train.DataParallelTrainer(
        train_a_second,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=storage_path, name=name, checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    ).fit()


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    import ray

    storage_path, num_rounds = sys.argv[1], int(sys.argv[2])
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    logging.getLogger("ray_lite").setLevel(logging.ERROR)
    fit(storage_path, "warm")
    began = time.monotonic()
    fit(storage_path, "measured")
    say(length_s=time.monotonic() - began)
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    threads = {thread for thread in threading.enumerate() if not thread.name.startswith("ray_")}
    for number in range(num_rounds):
        ended = False
        try:
            say(round=number)
            fit(storage_path, f"run-{number}")
            ended = True
            # The moment was after the end: the signal finds nothing to interrupt.
            signal.pause()
        except KeyboardInterrupt:
            say(back=number, ended=ended)
        assert [signal.getsignal(n) for n in _SIGNALS] == handlers
        wait_until(lambda: not living_actors(), f"no actors are left: {living_actors()}", 15)
        wait_until(lambda: not placement_groups(), f"no placement groups are left: {placement_groups()}", 15)
        left = lambda: [  # noqa: E731
            t for t in threading.enumerate() if t not in threads and not t.name.startswith("ray_")
        ]
        wait_until(lambda: not left(), f"no threads are left: {left()}", 15)
        for title in ("ray::Worker", "ray::Controller"):
            wait_until(lambda t=title: not processes_of(os.getsid(0), titled=t), f"no {title} is left", 15)
        say(clean=number)
        # The same process, and the same run.
        result = fit(storage_path, f"run-{number}")
        assert result.metrics == {"i": 19}
        say(again=number)
    ray.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
