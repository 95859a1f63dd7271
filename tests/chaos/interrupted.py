"""A process that fits again and again, and is interrupted each time: the script of ``test_interrupts.py``.

Prints JSON lines. In some rounds the signal comes from outside, at a moment of time; in the others
from here, when ``fit()`` has come to a certain call: steps that take no time are met too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from clusters import living_actors, placement_groups
from helpers import folder_with
from processes import say
from sessions import processes_of
from waiting import wait_until

from ray_lite import train
from ray_lite.train import CheckpointConfig, RunConfig, ScalingConfig

# Where processes and room are taken and given back.
_LIBRARY = Path(train.__file__).resolve().parent
_FILES = {str(_LIBRARY / "trainer.py"), str(_LIBRARY / "execution" / "worker_group.py")}
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
        run_config=RunConfig(storage_path=storage_path, name=name, checkpoint_config=CheckpointConfig(num_to_keep=2)),
    ).fit()


class CountCalls:
    """Counts calls and returns of the trainer's functions in this thread; at one of them comes Ctrl-C.

    Args:
        interrupt_at: The number of that call, from 1; None only counts.
    """

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.num_calls = 0
        self._interrupt_at = interrupt_at

    def __enter__(self) -> CountCalls:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "return") and frame.f_code.co_filename in _FILES:
            self.num_calls += 1
            if self.num_calls == self._interrupt_at:
                say(at=f"{event} {frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}")
                signal.raise_signal(signal.SIGINT)


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith("ray_")}


def check_nothing_is_left(threads: set[threading.Thread]) -> None:
    wait_until(lambda: not living_actors(), f"no actors are left: {living_actors()}", 15)
    wait_until(lambda: not placement_groups(), f"no placement groups are left: {placement_groups()}", 15)
    wait_until(lambda: own_threads() <= threads, f"no threads are left: {own_threads() - threads}", 15)
    for title in ("ray::Worker", "ray::Controller"):
        wait_until(lambda t=title: not processes_of(os.getsid(0), titled=t), f"no {title} is left", 15)


def main() -> None:
    import ray

    storage_path = sys.argv[1]
    # Per round: None, or the part of all calls after which Ctrl-C comes.
    rounds: list[float | None] = json.loads(sys.argv[2])
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    logging.getLogger("ray_lite").setLevel(logging.ERROR)
    fit(storage_path, "warm")
    with CountCalls() as counted:
        began = time.monotonic()
        fit(storage_path, "measured")
        length_s = time.monotonic() - began
    say(length_s=length_s)
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    threads = own_threads()
    for number, part in enumerate(rounds):
        ended = False
        try:
            say(round=number)
            if part is None:
                fit(storage_path, f"run-{number}")
            else:
                with CountCalls(1 + int(part * counted.num_calls)):
                    fit(storage_path, f"run-{number}")
            ended = True
            # The moment was after the end: the signal finds nothing to interrupt.
            if part is None:
                signal.pause()
        except KeyboardInterrupt:
            pass
        say(back=number, ended=ended)
        assert [signal.getsignal(n) for n in _SIGNALS] == handlers
        check_nothing_is_left(threads)
        say(clean=number)
        if number % 5 == 0:
            # The same process, and the same run.
            assert fit(storage_path, f"run-{number}").metrics == {"i": 19}
    ray.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
