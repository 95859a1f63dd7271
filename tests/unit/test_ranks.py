"""Ranks follow nodes and GPUs, whatever order the workers came up in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.execution.ranks import WorkerFacts, assign_ranks


def facts(node: str, *gpu_ids: str, ip: str = "10.0.0.1") -> WorkerFacts:
    return WorkerFacts(node_id=node, node_ip=ip, hostname=node, pid=1, gpu_ids=gpu_ids)


def test_interleaved_nodes_get_consecutive_ranks_in_order_of_appearance():
    assigned = assign_ranks([facts(n) for n in "ABACBA"])
    assert [index for index, _ in assigned] == [0, 2, 5, 1, 4, 3]
    assert [identity.node_rank for _, identity in assigned] == [0, 0, 0, 1, 1, 2]


def test_two_node_layout_of_the_old_thread():
    by_index = dict(assign_ranks([facts(n) for n in "AABAB"]))
    assert [by_index[i].local_rank for i in range(5)] == [0, 1, 0, 2, 1]
    assert [by_index[i].local_world_size for i in range(5)] == [3, 3, 2, 3, 2]
    assert [by_index[i].node_rank for i in range(5)] == [0, 0, 1, 0, 1]


def test_raylets_that_share_an_address_are_different_nodes():
    assigned = assign_ranks([facts("A", ip="127.0.0.1"), facts("B", ip="127.0.0.1")])
    assert [identity.local_world_size for _, identity in assigned] == [1, 1]


def test_local_ranks_follow_gpu_ids_by_value_not_by_text():
    assigned = assign_ranks([facts("A", "10"), facts("A", "2"), facts("A", "1", "11")])
    assert [index for index, _ in assigned] == [2, 1, 0]


def test_gpu_ids_that_are_no_numbers_are_ordered_too():
    assigned = assign_ranks([facts("A", "GPU-b"), facts("A", "GPU-a"), facts("A", "3")])
    assert [index for index, _ in assigned] == [2, 1, 0]


@given(nodes=st.lists(st.sampled_from("ABCD"), min_size=1, max_size=30))
def test_every_layout_has_the_shape_launchers_promise(nodes):
    assigned = assign_ranks([facts(n) for n in nodes])
    identities = [identity for _, identity in assigned]
    assert sorted(index for index, _ in assigned) == list(range(len(nodes)))
    assert [i.world_rank for i in identities] == list(range(len(nodes)))
    assert all(i.world_size == len(nodes) for i in identities)
    for index, identity in assigned:
        assert identity.node_id == nodes[index]
    base = 0
    for node_rank in range(len(set(nodes))):
        group = [i for i in identities if i.node_rank == node_rank]
        assert len({i.node_id for i in group}) == 1
        assert [i.world_rank for i in group] == list(range(base, base + len(group)))
        assert [i.local_rank for i in group] == list(range(len(group)))
        assert {i.local_world_size for i in group} == {len(group)}
        base += len(group)
