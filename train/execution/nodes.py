"""Run a small function on the nodes of workers: here if it is this node, else as a task there."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["draining_nodes", "find_lost_nodes", "living_nodes", "on_nodes"]

logger = logging.getLogger("ray_lite.train")

_CONNECT_TIMEOUT_S = 2.0
_NOTICED_AFTER_S = 60.0
_POLL_S = 0.1
_MAX_THREADS = 16


async def on_nodes(
    function: Callable[..., Any], calls: Mapping[int, tuple[str, tuple[Any, ...]]], *, timeout_s: float
) -> dict[int, Any]:
    """Call a function once per rank on that rank's node: one task a node, all nodes at the same time.

    Args:
        function: Blocking; importable by name.
        calls: World rank → Ray's id of the node, and the arguments.
        timeout_s: Seconds to wait for a node other than this one.

    Returns:
        World rank → what the function returned, or the exception: the function's own, a ``RayError`` where the
        node is gone, ``asyncio.TimeoutError`` where it did not answer in time.
    """
    by_node: dict[str, list[int]] = {}
    for rank, (node_id, _) in calls.items():
        by_node.setdefault(node_id, []).append(rank)
    here = ray.get_runtime_context().get_node_id()

    async def on_one(node_id: str, ranks: Sequence[int]) -> dict[int, Any]:
        arguments = [calls[rank][1] for rank in ranks]
        if node_id == here:
            return dict(zip(ranks, await asyncio.to_thread(call_each, function, arguments), strict=True))
        task = _remote_call_each().options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))

        async def wait() -> list[Any]:
            found: list[Any] = await task.remote(function, arguments)
            return found

        try:
            return dict(zip(ranks, await asyncio.wait_for(wait(), timeout_s), strict=True))
        except (RayError, asyncio.TimeoutError) as error:
            return dict.fromkeys(ranks, error)

    found: dict[int, Any] = {}
    for part in await asyncio.gather(*[on_one(node_id, ranks) for node_id, ranks in by_node.items()]):
        found.update(part)
    return found


def call_each(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function with each of the arguments at the same time; an exception stands for its result."""

    def call(args: tuple[Any, ...]) -> Any:
        try:
            return function(*args)
        # One rank's folder may be gone; the others are still to be looked at.
        except Exception as error:  # noqa: BLE001
            return error

    if len(arguments) == 1:
        return [call(arguments[0])]
    with ThreadPoolExecutor(min(len(arguments), _MAX_THREADS)) as pool:
        return list(pool.map(call, arguments))


@functools.cache
def _remote_call_each() -> Any:
    """One remote function for all calls: Ray keeps each that is made until the job ends."""
    return ray.remote(num_cpus=0, max_retries=0)(call_each)


def draining_nodes() -> dict[str, int]:
    """Ray's id of each node that is being drained → its deadline in ms since the epoch, 0 when there is none.

    Such a node takes no new work. Empty where this version of Ray does not tell, or its head does not answer now.
    """
    from ray._private.state import state

    try:
        found: dict[str, int] = state.get_draining_nodes()
    # Its client raises several kinds of errors; the next look is soon.
    except Exception as error:  # noqa: BLE001
        logger.debug("whether nodes are drained cannot be told now: %s", error)
        return {}
    return found


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
