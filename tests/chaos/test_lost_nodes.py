"""A node is lost in the middle of a run: it resumes on what is there, and no failure is counted (case 101)."""

from __future__ import annotations

import pytest
from processes import Child
from sessions import processes_of
from waiting import wait_until


def lose_a_node(tmp_path, kind: str) -> tuple[dict, list[list]]:
    child = Child("two_nodes.py", str(tmp_path), kind)
    out = child.read(150)
    assert child.read(60) == {"done": True}
    child.finish(60)
    wait_until(lambda: not processes_of(child.session, titled="ray::"), "no worker is left", 60)
    return out["metrics"], out["starts"]


def check_starts(starts: list[list], *, world_size: int) -> None:
    first = [row for row in starts if row[0] == 1]
    later = [row for row in starts if row[0] == max(row[0] for row in starts)]
    assert sorted(row[1] for row in first) == [0, 1]
    assert len({row[5] for row in first}) == 2
    assert sorted(row[1] for row in later) == list(range(world_size))
    assert {row[2] for row in later} == {world_size}
    assert sorted(row[3] for row in later) == list(range(world_size))
    # From a checkpoint, the same on every rank; both had reported five times when the node was lost.
    assert len({row[4] for row in later}) == 1
    assert later[0][4] >= 4


def test_a_run_resumes_when_a_new_node_takes_the_place_of_a_lost_one(tmp_path):
    metrics, starts = lose_a_node(tmp_path, "replaced")
    check_starts(starts, world_size=2)
    assert metrics["start"] >= 4
    lost = {row[5] for row in starts if row[0] == 1} - {row[5] for row in starts if row[0] > 1}
    assert len(lost) == 1


@pytest.mark.proof
def test_an_elastic_run_resumes_on_the_nodes_that_are_left(tmp_path):
    metrics, starts = lose_a_node(tmp_path, "elastic")
    check_starts(starts, world_size=1)
    assert metrics["start"] >= 4
