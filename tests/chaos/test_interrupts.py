"""Ctrl-C, at whatever moment: soon back, nothing left, and the same process can go on."""

from __future__ import annotations

import random
import threading
import time

import pytest
from processes import Child, processes_of
from waiting import wait_until

BACK_WITHIN_S = 15.0


def interrupt(tmp_path, rng: random.Random, count: int) -> list[float]:
    """Interrupt a fitting process at random moments; returns how long it took each time to come back."""
    child = Child("interrupted.py", str(tmp_path / "runs"), str(count))
    length_s = child.read(120)["length_s"]
    pause = threading.Event()
    took = []
    for number in range(count):
        assert child.read(60) == {"round": number}
        # A little past the end too.
        moment_s = rng.uniform(0.0, 1.05 * length_s)
        pause.wait(moment_s)
        child.interrupt()
        began = time.monotonic()
        back = child.read(60)
        took.append(time.monotonic() - began)
        assert back["back"] == number
        print(f"round {number}: at {moment_s:.2f} of {length_s:.2f} s, ended={back['ended']}, back after {took[-1]:.2f} s")
        assert child.read(60) == {"clean": number}
        assert child.read(60) == {"again": number}
    assert child.read(60) == {"done": True}
    child.finish(60)
    wait_until(lambda: not processes_of(child.session), "every process has ended", 60)
    assert max(took) < BACK_WITHIN_S
    return took


def test_ctrl_c_at_2_random_moments_leaves_nothing(tmp_path):
    assert len(interrupt(tmp_path, random.Random(4), 2)) == 2


@pytest.mark.proof
def test_ctrl_c_at_30_random_moments_leaves_nothing(tmp_path):
    assert len(interrupt(tmp_path, random.Random(5), 30)) == 30
