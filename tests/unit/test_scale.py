"""From 512 ranks to 4,096 the work grows with the number of ranks, not with its square.

Eight times the ranks may cost at most sixteen times the work: that leaves room for a logarithm, and none
for a look at all ranks on behalf of each. Counted in executed lines of Python, which are the same on every
machine; what a loop inside C costs (``min`` over a dict) is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from ray_lite.train.configs import ScalingConfig
from ray_lite.train.execution.consolidate import Consolidator
from ray_lite.train.execution.decide import order_by_cause
from ray_lite.train.execution.failures import format_ranks
from ray_lite.train.execution.placement import can_ever_fit, num_fitting
from ray_lite.train.execution.progress import Progress
from ray_lite.train.execution.ranks import WorkerFacts, assign_ranks
from ray_lite.train.torch.process_group import _missing, _named, _say

FEW, MANY = 512, 4_096
MOST_GROWTH = 16
PER_NODE = 8


def num_lines(work: Callable[[int], object], world_size: int) -> int:
    """How many lines of Python ``work(world_size)`` executes."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        work(world_size)
    finally:
        sys.settrace(old)
    return count


def reports_in_step(world_size: int) -> None:
    progress = Progress(world_size, 0)
    for index in range(3):
        for rank in range(world_size):
            progress.reported(rank, index, is_pending=True)
        for rank in range(world_size):
            progress.upload_ended(rank, index)
            assert progress.complete_below == (index + 1 if rank == world_size - 1 else index)
    for rank in range(world_size):
        progress.finished(rank)
        _ = progress.complete_below


def reports_far_apart(world_size: int) -> None:
    """Each rank stands at a mark of its own when the slowest finish first."""
    progress = Progress(world_size, 0)
    for rank in range(world_size):
        for index in range(rank % 50):
            progress.reported(rank, index)
        _ = progress.complete_below
    for rank in range(world_size):
        progress.finished(rank)
        _ = progress.complete_below


def lines_in_step(world_size: int, **options: Any) -> None:
    consolidator = Consolidator(world_size, **options)
    for index in range(3):
        for rank in range(world_size):
            list(consolidator.add(rank, index, b"line"))
    for rank in range(world_size):
        list(consolidator.finished(rank))


def lines_behind_a_late_rank(world_size: int) -> None:
    """Reports wait up to the limit, and the oldest go out one by one."""
    consolidator = Consolidator(world_size, waits_for_all=True, max_waiting=3)
    for index in range(5):
        for rank in range(1, world_size):
            list(consolidator.add(rank, index, b"line"))
    for index in range(5):
        list(consolidator.add(0, index, b"line"))


def ranks_of_interleaved_workers(world_size: int) -> None:
    num_nodes = world_size // PER_NODE
    facts = [
        WorkerFacts(
            node_id=str(index % num_nodes), node_ip="", hostname="", pid=index, gpu_ids=(str(index % PER_NODE),)
        )
        for index in range(world_size)
    ]
    assert len(assign_ranks(facts)) == world_size


def room_for(world_size: int, strategy: str, selector: Any) -> None:
    """Half of the nodes that would be needed, so that the size that fits is far from the first that comes to mind."""
    nodes = [{"CPU": float(PER_NODE)}] * (world_size // PER_NODE // 2)
    labels = [{"zone": "ab"[index % 2], "node": str(index)} for index in range(len(nodes))]
    config = ScalingConfig(
        num_workers=(world_size // 8, world_size), placement_strategy=strategy, label_selector=selector
    )
    num_fitting(config, nodes, labels)
    options = {"label_selector": selector, "node_labels": labels}
    can_ever_fit(config.worker_resources, world_size, strategy, nodes, **options)


def causes_in_order(world_size: int) -> None:
    told = [
        ("RuntimeError", "Connection closed by peer", ()),
        ("MyError", "", (("RuntimeError", "gloo/transport"),)),
        ("ValueError", "boom", ()),
    ]
    failures = []
    for rank in range(world_size):
        type_name, message, causes = told[rank % 3]
        failures.append((rank, type_name, message, float(-rank), rank % 5 == 0, causes))
    assert len(order_by_cause(failures)) == world_size


def names_of_ranks(world_size: int) -> None:
    format_ranks([rank for rank in range(world_size) if rank % 3])


@pytest.mark.parametrize(
    "work",
    [
        reports_in_step,
        reports_far_apart,
        lines_in_step,
        lambda world_size: lines_in_step(world_size, waits_for_all=True),
        lines_behind_a_late_rank,
        ranks_of_interleaved_workers,
        lambda world_size: room_for(world_size, "PACK", None),
        lambda world_size: room_for(world_size, "STRICT_SPREAD", {"zone": "a"}),
        lambda world_size: room_for(world_size, "SPREAD", [{}, {"zone": "a"}, {}, {"zone": "!a"}] * (world_size // 4)),
        lambda world_size: room_for(
            world_size, "STRICT_PACK", [{"zone": "in(a,b)"}, {"zone": "a"}] * (world_size // 2)
        ),
        causes_in_order,
        names_of_ranks,
    ],
    ids=[
        "reports in step",
        "reports far apart",
        "lines in step",
        "lines of all",
        "lines behind a late rank",
        "ranks",
        "room",
        "room with labels",
        "room with labels per worker",
        "room on one node",
        "causes",
        "names",
    ],
)
def test_the_work_grows_with_the_ranks_and_not_with_their_square(work):
    few, many = num_lines(work, FEW), num_lines(work, MANY)
    assert few > 0
    assert many / few < MOST_GROWTH, f"{few} lines for {FEW} ranks, {many} for {MANY}"


class CountingStore:
    """A ``TCPStore`` of one process, in which no time passes; counts the keys that it is asked about."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_keys = 0

    def set(self, key: str, value: str) -> None:
        self.num_keys += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.num_keys += 1
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.num_keys += 1
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = b"%d" % total
        return total

    def check(self, keys: list[str]) -> bool:
        self.num_keys += len(keys)
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: Any) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")


def keys_asked(num_missing: int, world_size: int) -> int:
    """All ranks but the last few arrive, wait in vain, and look who is missing."""
    store: Any = CountingStore()
    present = range(world_size - num_missing)
    for rank in present:
        _say("here", store, rank, world_size)
    names = _named(range(world_size - num_missing, world_size))
    assert {_missing("here", store, world_size) for _ in present} == {names}
    return store.num_keys


@pytest.mark.parametrize("num_missing", [1, 3, 40])
def test_when_ranks_are_missing_all_are_told_which_and_only_one_looks(num_missing):
    """Each rank asked for each other: 16 million questions for rank 0 to answer."""
    few, many = keys_asked(num_missing, FEW), keys_asked(num_missing, MANY)
    assert many / few < MOST_GROWTH
    assert many < 20 * MANY


def test_when_the_rank_that_looks_dies_another_one_looks():
    store: Any = CountingStore()
    _say("here", store, 1, 3)
    store.add("ray_lite/here/looks", 1)
    assert _missing("here", store, 3) == "ranks 0, 2"
