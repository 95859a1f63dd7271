"""SIGTERM with 10 s to go and 256 MB to save: what was trained is saved each time."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import note, notes

from ray_lite import train
from ray_lite.train import CheckpointConfig, FailureConfig
from ray_lite.train.collective import broadcast_from_rank_zero

STATE_BYTES = 256_000_000
GRACE_S = 10.0


def train_heavy(config: dict[str, Any]) -> None:
    """Count steps in a state of 256 MB, and save only when told to."""
    context = train.get_context()
    rank, scratch = context.get_world_rank(), config["scratch"]
    state = bytearray(STATE_BYTES // 2)
    checkpoint = train.get_checkpoint()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state[:] = Path(folder, f"state-{rank}").read_bytes()
        start = int.from_bytes(state[:8], "big")
        assert state[-8:] == state[:8]
    note(scratch, f"starts-{rank}", start)
    number = context.get_attempt() - 1
    if number == len(config["victims"]):
        train.report({"step": start})
        return
    step = start
    pause = threading.Event()
    victim, moment = config["victims"][number]
    while True:
        step += 1
        if step - start == 1 + moment and rank == victim:
            os.kill(os.getpid(), signal.SIGTERM)
        pause.wait(0.01)
        if broadcast_from_rank_zero(context.should_checkpoint()):
            break
    state[:8] = state[-8:] = step.to_bytes(8, "big")
    with train.staging_directory() as folder:
        Path(folder, f"state-{rank}").write_bytes(state)
        train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))
    info = context.get_preemption_info()
    note(scratch, f"saved-{rank}", [step, info.seconds_left(), info.preempted_ranks])


def preempt(fit, scratch, seed: int, count: int) -> int:
    rng = random.Random(seed)
    victims = [(rng.randrange(2), rng.randrange(10)) for _ in range(count)]
    result = fit(
        train_heavy,
        cfg={"scratch": str(scratch), "victims": victims},
        cc=CheckpointConfig(num_to_keep=1),
        fc=FailureConfig(max_failures=0, preemption_grace_s=GRACE_S),
    )
    for rank in range(2):
        saved = notes(scratch, f"saved-{rank}")
        assert [ranks for _, _, ranks in saved] == [[victim] for victim, _ in victims]
        assert min(left for _, left, _ in saved) > 0
        # Nothing is lost: each attempt starts with the step that the one before had reached.
        assert notes(scratch, f"starts-{rank}") == [0, *[step for step, _, _ in saved]]
    assert result.metrics == {"step": saved[-1][0]}
    return len(saved)


def test_a_256_mb_state_is_saved_in_2_of_2_preemptions(fit, scratch):
    assert preempt(fit, scratch, seed=6, count=2) == 2


@pytest.mark.proof
def test_a_256_mb_state_is_saved_in_50_of_50_preemptions(fit, scratch):
    assert preempt(fit, scratch, seed=7, count=50) == 50
