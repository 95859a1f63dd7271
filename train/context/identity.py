"""Who a worker is, and which run it works for: plain values, sent to it when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["RunIdentity", "WorkerIdentity"]


@attrs.frozen(kw_only=True)
class WorkerIdentity:
    """One worker's place in its group.

    Attributes:
        world_rank: This worker, in ``[0, world_size)``.
        world_size: Workers in the group, >= 1.
        local_rank: This worker among those of its node, in ``[0, local_world_size)``.
        local_world_size: Workers on its node, >= 1.
        node_rank: Its node's index, in order of the lowest world rank there.
        node_id: Ray's id of the node; empty in local mode.
        node_ip: The node's address.
        resources: What is reserved for this worker alone: name → amount.
        gpu_ids: Ids of the GPUs assigned to it, as Ray gives them.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    node_id: str = ""
    node_ip: str = "127.0.0.1"
    resources: Mapping[str, float] = attrs.field(factory=dict)
    gpu_ids: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RunIdentity:
    """The run and the attempt a worker belongs to.

    Attributes:
        name: ``RunConfig.name``.
        path: Where the run lies: a folder, or a URI.
        run_id: 32 hex digits, the same over all attempts of one ``fit()``.
        attempt: Which life of the worker group this is, from 1, over all ``fit()`` calls of the run.
        metadata: ``Trainer(metadata=...)``.
    """

    name: str
    path: str
    run_id: str
    attempt: int
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
