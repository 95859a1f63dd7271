"""Whether a run's lock is held by a controller that lives, on whatever machine of this cluster."""

from __future__ import annotations

import ray
from ray._private.state import actors
from ray.exceptions import RayError

from ..storage.store import HolderInfo

__all__ = ["is_alive", "lock_id"]


def lock_id() -> str:
    """What this actor writes into the lock: ``<cluster session>/<actor id>``; empty where Ray names no session."""
    cluster = _cluster()
    return f"{cluster}/{ray.get_runtime_context().get_actor_id()}" if cluster else ""


def is_alive(holder: HolderInfo) -> bool | None:
    """Whether the actor that took a lock lives; None when it belongs to another cluster."""
    cluster, _, actor_id = holder.run_id.partition("/")
    if not actor_id or cluster != _cluster():
        return None
    try:
        found = actors(actor_id)
    except (RayError, RuntimeError, ValueError):
        return None
    # Ray forgets actors that have long been dead.
    return bool(found) and found.get("State") != "DEAD"


def _cluster() -> str:
    try:
        return str(ray.get_runtime_context().get_session_name())
    # Not there on every version of Ray; then locks of other machines are left to the user.
    except AttributeError:
        return ""
