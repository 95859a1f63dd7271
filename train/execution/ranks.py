"""Which worker gets which rank: a pure function of where the workers landed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ..context.identity import WorkerIdentity

__all__ = ["WorkerFacts", "assign_ranks"]


@attrs.frozen(kw_only=True)
class WorkerFacts:
    """What a started worker says about itself.

    Attributes:
        node_id: Ray's id of its node.
        node_ip: The node's address.
        hostname: The node's name.
        pid: Process id on that node.
        started: Start time of that process, by which it is told from a later one of the same id.
        gpu_ids: Ids of the GPUs assigned to it, as Ray gives them.
        resources: What is reserved for it: name → amount.
    """

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    started: str = ""
    gpu_ids: tuple[str, ...] = ()
    resources: Mapping[str, float] = attrs.field(factory=dict)


def assign_ranks(facts: Sequence[WorkerFacts]) -> list[tuple[int, WorkerIdentity]]:
    """World ranks in order, each with the index of its worker in ``facts``.

    Ranks are consecutive on each node, nodes in the order in which they first appear, and
    workers of a node in the order of their lowest GPU id, so that local rank and device
    order agree. Nodes are told apart by their id: two raylets may share an address.

    Args:
        facts: One entry per worker, in the order in which they were started.

    Returns:
        ``[(index in facts, identity), ...]``, sorted by world rank.

    Source:
        The rule of ``torchrun`` and MPI launchers: rank = ranks on earlier nodes + local rank.
    """
    by_node: dict[str, list[int]] = {}
    for index, fact in enumerate(facts):
        by_node.setdefault(fact.node_id, []).append(index)

    assigned: list[tuple[int, WorkerIdentity]] = []
    for node_rank, indices in enumerate(by_node.values()):
        ordered = sorted(indices, key=lambda index: _lowest_gpu(facts[index].gpu_ids))
        for local_rank, index in enumerate(ordered):
            fact = facts[index]
            identity = WorkerIdentity(
                world_rank=len(assigned),
                world_size=len(facts),
                local_rank=local_rank,
                local_world_size=len(ordered),
                node_rank=node_rank,
                node_id=fact.node_id,
                node_ip=fact.node_ip,
                resources=dict(fact.resources),
                gpu_ids=fact.gpu_ids,
            )
            assigned.append((index, identity))
    return assigned


def _lowest_gpu(gpu_ids: Sequence[str]) -> tuple[int, str]:
    """Sort key: numbers by value, other ids (UUIDs, MIG names) after them by text, none first."""
    if not gpu_ids:
        return (-1, "")
    return min((int(gpu_id), "") if gpu_id.isdigit() else (1 << 31, gpu_id) for gpu_id in gpu_ids)
