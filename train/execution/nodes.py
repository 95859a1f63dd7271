"""Run a small function on the node of a worker: here if it is this node, else as a task there."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["find_lost_nodes", "living_nodes", "on_node"]

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 2.0
_NOTICED_AFTER_S = 60.0
_POLL_S = 0.1


async def on_node(node_id: str, function: Callable[..., T], *args: Any, timeout_s: float) -> T:
    """Call ``function(*args)`` on a node.

    Args:
        node_id: Ray's id of the node.
        function: Blocking; importable or picklable.
        timeout_s: Seconds to wait for a node other than this one.

    Raises:
        ray.exceptions.RayError: The node is gone.
        asyncio.TimeoutError: It did not answer in time.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(function, *args)
    task = ray.remote(num_cpus=0, max_retries=0)(function).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )

    async def wait() -> T:
        result: T = await task.remote(*args)
        return result

    return await asyncio.wait_for(wait(), timeout_s)


def living_nodes() -> set[str]:
    """Ids of the nodes that are up."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


async def find_lost_nodes(node_ids: Collection[str]) -> set[str]:
    """Those of the nodes that are gone.

    When a machine goes away, its workers are missed at once, but Ray counts the node as alive until
    it has failed several health checks (about 15 s). Until then it would place the next workers there;
    so a node whose own server no longer answers is waited for, until Ray knows too.
    """
    lost: set[str] = set()
    deadline = time.monotonic() + _NOTICED_AFTER_S
    silent: set[str] | None = None
    while True:
        servers = await asyncio.to_thread(_servers)
        lost |= set(node_ids) - set(servers)
        if silent is None:
            living = [node_id for node_id in node_ids if node_id in servers]
            answers = await asyncio.gather(*[asyncio.to_thread(_answers, servers[node_id]) for node_id in living])
            silent = {node_id for node_id, answer in zip(living, answers, strict=True) if not answer}
        if silent <= lost:
            return lost
        if time.monotonic() > deadline:
            return lost | silent
        await asyncio.sleep(_POLL_S)


def _servers() -> dict[str, tuple[str, int]]:
    """Id of each node that Ray takes for alive → address of its own server."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]
    }


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
