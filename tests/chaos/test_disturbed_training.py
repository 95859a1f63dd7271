"""However often it is disturbed, a training ends with the weights it would have had."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from disturbed import StorageWithFaults, fault_plan, final_weights, train_disturbed
from helpers import notes

from ray_lite.train import CheckpointConfig, FailureConfig

ERROR_RATE = 0.03
SPARE_STEPS = 60
"""After the last fault, so that it is over before the training is."""


def disturb(fit, scratch, seed: int, num_faults: int, **failure_options) -> int:
    """Train with and without faults; returns the number of restarts."""
    rng = random.Random(seed)
    faults = fault_plan(rng, num_faults)
    num_steps = faults[-1].step + SPARE_STEPS
    base = {"num_steps": num_steps}
    keep = CheckpointConfig(num_to_keep=3)
    quiet = scratch / "quiet"
    quiet.mkdir()
    undisturbed = fit(train_disturbed, cfg={**base, "scratch": str(quiet), "faults": []}, cc=keep, name="undisturbed")

    result = fit(
        train_disturbed,
        cfg={**base, "scratch": str(scratch), "faults": faults},
        cc=keep,
        # Not one more than planned: a failure that nobody ordered would end the run.
        fc=FailureConfig(
            max_failures=sum(fault.kind != "term" for fault in faults), hang_timeout_s=3, **failure_options
        ),
        name="disturbed",
        storage_filesystem=StorageWithFaults(seed, ERROR_RATE),
    )
    assert final_weights(result.checkpoint) == final_weights(undisturbed.checkpoint)
    assert [row["done"] for row in result.metrics_history] == list(range(1, num_steps + 1))

    struck = notes(scratch, "faults")
    assert [fault["number"] for fault in struck] == list(range(num_faults))
    for rank in range(2):
        starts = notes(scratch, f"starts-{rank}")
        assert [attempt for attempt, _ in starts] == list(range(1, num_faults + 2))
        for fault, (_, start) in zip(struck, starts[1:], strict=True):
            assert fault["least"] <= start <= fault["most"], fault
    # Nothing of what was torn or given up is left. What was damaged stays for whoever wants to know why, uncounted.
    folders = {path.name for path in Path(result.path).iterdir() if path.is_dir() and path.name != "metrics"}
    assert len(folders - set(notes(scratch, "damaged"))) == 3
    return num_faults


def test_9_faults_in_one_run_leave_the_weights_as_they_would_have_been(fit, scratch):
    assert disturb(fit, scratch, seed=0, num_faults=9) == 9


@pytest.mark.proof
def test_20_faults_in_one_run_leave_the_weights_as_they_would_have_been(fit, scratch):
    assert disturb(fit, scratch, seed=1, num_faults=20) == 20


@pytest.mark.proof
def test_20_faults_in_place_leave_the_weights_as_they_would_have_been(fit, scratch):
    assert disturb(fit, scratch, seed=2, num_faults=20, restart="in_place", standby_workers=1) == 20
