"""Collectives without torch: all meet, and whoever does not come is named."""

from __future__ import annotations

import pytest
from helpers import note, notes, rank

from ray_lite import train
from ray_lite.train import CollectiveError, WorkerGroupError


def test_barrier_and_broadcast_bring_all_ranks_together(fit, scratch):
    def fn(config):
        for i in range(5):
            train.collective.barrier()
            data = train.collective.broadcast_from_rank_zero({"from": rank(), "i": i, "big": b"x" * 300_000})
            note(config["scratch"], "got", [data["from"], data["i"], len(data["big"])])

    fit(fn, n=3, cfg={"scratch": str(scratch)})
    assert sorted(notes(scratch, "got")) == sorted([0, i, 300_000] for i in range(5) for _ in range(3))


def test_a_missing_rank_is_named_when_the_time_is_over(fit):
    def fn():
        if rank() == 1:
            import signal

            signal.pause()
        train.collective.barrier(timeout_s=1)

    with pytest.raises(WorkerGroupError, match=r"waits in vain for rank 1: not within timeout_s=1") as caught:
        fit(fn, n=2)
    assert isinstance(caught.value.__cause__, CollectiveError)


def test_a_rank_that_has_finished_is_not_waited_for(fit):
    def fn():
        if rank() == 1:
            return
        train.collective.barrier()

    with pytest.raises(WorkerGroupError, match="rank 1 finished already"):
        fit(fn, n=2)


def test_different_calls_at_the_same_place_are_named(fit):
    def fn():
        if rank() == 1:
            train.collective.barrier()
        else:
            train.collective.broadcast_from_rank_zero(1)

    with pytest.raises(WorkerGroupError, match="all ranks must make the same calls"):
        fit(fn, n=2)


def test_what_rank_0_cannot_send_is_told_to_all(fit):
    def fn():
        import threading

        train.collective.broadcast_from_rank_zero(threading.Lock())

    with pytest.raises(WorkerGroupError, match="cannot be pickled"):
        fit(fn, n=2)


def test_in_local_mode_they_are_the_identity(fit):
    def fn():
        train.collective.barrier()
        return train.collective.broadcast_from_rank_zero([1])

    assert fit(fn, n=0).return_value == [1]
