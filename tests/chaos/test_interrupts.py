"""Ctrl-C, at whatever moment: soon back, nothing left, and the same process can go on."""

from __future__ import annotations

import json
import logging
import random
import threading
import time

import pytest
from processes import Child
from sessions import processes_of
from waiting import wait_until

BACK_WITHIN_S = 15.0

logger = logging.getLogger(__name__)


def interrupt(tmp_path, rounds: list[float]) -> list[float]:
    """Interrupt a fitting process in each round; returns how long it took each time to come back.

    Args:
        rounds: A part of the undisturbed time in [0, 1]; or a negative number: a part of all calls.
    """
    in_code = [-part if part < 0 else None for part in rounds]
    child = Child("interrupted.py", str(tmp_path / "runs"), json.dumps(in_code))
    length_s = child.read(120)["length_s"]
    pause = threading.Event()
    took = []
    for number, part in enumerate(rounds):
        assert child.read(60) == {"round": number}
        if part >= 0:
            pause.wait(part * length_s)
            child.interrupt()
        began = time.monotonic()
        back = child.read(60)
        where = f"{part:.3f} of {length_s:.2f} s"
        if "at" in back:
            where = back["at"]
            began = time.monotonic()
            back = child.read(60)
        took.append(time.monotonic() - began)
        logger.info("round %d: at %s, had ended: %s, back after %.2f s", number, where, back["ended"], took[-1])
        assert back["back"] == number
        assert child.read(60) == {"clean": number}
    assert child.read(60) == {"done": True}
    child.finish(60)
    wait_until(lambda: not processes_of(child.session), "every process has ended", 60)
    assert max(took) < BACK_WITHIN_S
    return took


def moments(rng: random.Random, *, num_times: int, num_calls: int) -> list[float]:
    """Moments of time, a little past the end too, and calls: most near the start and near the end."""
    times = [rng.uniform(0.0, 1.05) for _ in range(num_times)]
    calls = [-max(1e-6, rng.choice([rng.random(), rng.random() ** 3, 1 - rng.random() ** 3])) for _ in range(num_calls)]
    return times + calls


def test_ctrl_c_at_4_random_moments_leaves_nothing(tmp_path):
    assert len(interrupt(tmp_path, moments(random.Random(4), num_times=2, num_calls=2))) == 4


@pytest.mark.proof
def test_ctrl_c_at_30_random_moments_leaves_nothing(tmp_path):
    # At moments of time, and in steps of the trainer's own that take none.
    assert len(interrupt(tmp_path, moments(random.Random(5), num_times=18, num_calls=12))) == 30
